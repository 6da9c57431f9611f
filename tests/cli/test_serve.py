"""thinpipe serve, and the options of its clients: tickets in both directions, rejections, and processes that die."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.serve.machines import (
    DIGITS,
    LIMIT_S,
    Command,
    Machine,
    children_of,
    listeners_of,
    machines,
    until,
)
from thinpipe.comm.errors import ended_by
from thinpipe.comm.signals import REPEAT_S
from thinpipe.lab.records.record import Record

pytestmark = pytest.mark.timeout(3 * LIMIT_S)
LONG = [*DIGITS[:6], "--epochs", "1000", *DIGITS[8:]]  # goes on until it is ended


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """A client, another client, and a server that listens for two of them, one run at a time."""
    with machines(tmp_path_factory.mktemp("lab"), "client", "other", "server") as found:
        found[2].type("serve", "--listen", "127.0.0.1:0", "--name", "gpu", "--threads", "1")
        yield found


def ticket_of(lab: list[Machine]) -> str:
    return lab[2].commands[0].ticket()


def train(client: Machine, *options: str, **given: object) -> Command:
    return client.type("train", *options, "--threads", "1", **given)


def worker_of(server: Command) -> int:
    """The process of the run on a server: the child of the process that forks."""
    found: list[int] = []

    def look() -> bool:
        children = children_of(server.process.pid)
        grand = [each for child in children for each in children_of(child)]
        found[:] = grand
        return len(grand) == 1

    until(look, LIMIT_S, lambda: f"workers {found}")
    return found[0]


def test_servers_that_dial_a_client_are_relayed_and_one_port_is_open_in_all(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "one", "two") as (client, *servers):
        command = train(
            client, *DIGITS, "--epochs", "2", "--listen", "127.0.0.1:0", "--workers", "3", "--json", "r.json"
        )
        ticket = command.ticket()
        served = [each.type("serve", ticket, "--once", "--threads", "1") for each in servers]
        command.shows("epoch +1/2")
        everyone = [command.process.pid, *(each.process.pid for each in served)]
        everyone += [pid for each in everyone for pid in children_of(each)]
        assert len(listeners_of(everyone)) == 1
        assert command.wait() == 0, command.err
        assert "workers 1 and 2 do not reach each other: their traffic passes through here" in command.err
        assert [each.wait() for each in served] == [0, 0], [each.err for each in served]
        row = Record.read(client.folder / "r.json").rows[0]
        local = train(client, *DIGITS, "--epochs", "2", "--workers", "3", "--json", "l.json")
        assert local.wait() == 0
        assert row["parameters_sha256"] == Record.read(client.folder / "l.json").rows[0]["parameters_sha256"]


def test_servers_that_dial_a_client_and_listen_for_each_other_are_not_relayed(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "one", "two") as (client, *servers):
        command = train(client, *DIGITS, "--listen", "127.0.0.1:0", "--workers", "3")
        options = ["--listen", "127.0.0.1:0", "--once", "--threads", "1"]
        served = [each.type("serve", command.ticket(), *options) for each in servers]
        assert command.wait() == 0, command.err
        assert "reach each other" not in command.err
        assert [each.wait() for each in served] == [0, 0]


def test_a_signal_ends_a_client_that_waits_for_servers_and_a_server_that_waits_for_clients(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "server") as (client, server):
        command = train(client, *DIGITS, "--listen", "127.0.0.1:0", "--workers", "2")
        serving = server.type("serve", "--listen", "127.0.0.1:0")
        for each, number, code in ((command, signal.SIGINT, 130), (serving, signal.SIGTERM, 143)):
            each.ticket()
            each.process.send_signal(number)
            assert each.wait() == code
            assert "Traceback" not in each.err
            assert each.err.splitlines()[-1] == f"thinpipe: {ended_by(number)}"


def test_a_killed_worker_ends_the_run_in_one_line_and_the_server_takes_the_next(lab: list[Machine]) -> None:
    client, _, server = lab
    command = train(client, *LONG, "--servers", ticket_of(lab))
    command.shows("epoch +1/1000")
    began = time.monotonic()
    os.kill(worker_of(server.commands[0]), signal.SIGKILL)
    assert command.wait() == 1
    assert time.monotonic() - began < 40  # the patience is 60 s: the supervisor has reported it
    assert "worker 1: killed by signal 9 (SIGKILL) on gpu" in command.err
    assert train(client, *DIGITS, "--servers", ticket_of(lab)).wait() == 0


def test_a_second_client_is_told_that_the_server_is_busy_or_that_the_ticket_is_used_up(lab: list[Machine]) -> None:
    client, other, server = lab
    first = train(client, *LONG, "--servers", ticket_of(lab))
    first.shows("epoch +1/1000")
    second = train(client, *DIGITS, "--servers", ticket_of(lab))
    third = train(other, *DIGITS, "--servers", ticket_of(lab))
    assert second.wait() == third.wait() == 2
    assert "worker 1 (gpu): gpu is busy with a run since 0 min" in second.err
    assert "the ticket has admitted as many new peers as it may" in third.err
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130
    assert "interrupted" in first.err
    server.commands[0].shows(r"run \w+ \(train\) .* has ended: .*(SIGINT|interrupted)")


def test_a_client_that_is_killed_frees_the_server_within_the_patience(lab: list[Machine]) -> None:
    client, _, server = lab
    command = train(client, *LONG, "--servers", ticket_of(lab), "--patience", "5")
    command.shows("epoch +1/1000")
    worker = worker_of(server.commands[0])
    command.process.send_signal(signal.SIGKILL)
    command.wait()
    until(lambda: not Path(f"/proc/{worker}").exists(), 40, lambda: server.commands[0].err)
    # The channel or the heartbeats notice it first.
    server.commands[0].shows("has ended: worker 0 (is gone|has been silent)")
    assert train(client, *DIGITS, "--servers", ticket_of(lab)).wait() == 0


def test_a_signal_to_a_server_stops_the_run_after_a_step_with_a_checkpoint_of_the_client(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "server") as (client, server):
        serving = server.type("serve", "--listen", "127.0.0.1:0", "--threads", "1")
        command = train(client, *LONG, "--servers", serving.ticket(), "--save", "run")
        command.shows("epoch +1/1000")
        serving.process.send_signal(signal.SIGTERM)
        assert command.wait() == 143
        assert "worker 1 was ended by SIGTERM" in command.err
        assert "the last checkpoint is run/step-" in command.err
        assert serving.wait() == 143
        assert not list(server.folder.rglob("step-*"))


def test_a_second_signal_ends_a_server_whose_run_cannot_stop(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "server") as (client, server):
        serving = server.type("serve", "--listen", "127.0.0.1:0", "--threads", "1")
        command = train(client, *LONG, "--servers", serving.ticket())
        command.shows("epoch +1/1000")
        command.process.send_signal(signal.SIGSTOP)
        serving.process.send_signal(signal.SIGTERM)
        time.sleep(REPEAT_S + 0.5)
        assert serving.process.poll() is None
        serving.process.send_signal(signal.SIGTERM)
        assert serving.wait() == 143
        command.process.send_signal(signal.SIGCONT)
        assert command.wait() == 1
        assert "worker 1: killed by signal 9 (SIGKILL)" in command.err


def test_a_server_with_several_runs_serves_two_clients_at_the_same_time(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "other", "server") as (client, other, server):
        serving = server.type("serve", "--listen", "127.0.0.1:0", "--threads", "1", "--runs", "2")
        first = train(client, *LONG, "--servers", serving.ticket())
        first.shows("epoch +1/1000")
        assert train(other, *DIGITS, "--servers", serving.ticket()).wait() == 0
        assert first.process.poll() is None
        first.process.send_signal(signal.SIGINT)
        assert first.wait() == 130


def test_a_supervisor_that_is_killed_ends_its_run_on_all(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "server") as (client, server):
        serving = server.type("serve", "--listen", "127.0.0.1:0", "--threads", "1")
        command = train(client, *LONG, "--servers", serving.ticket(), "--patience", "5")
        command.shows("epoch +1/1000")
        worker = worker_of(serving)
        serving.process.send_signal(signal.SIGKILL)
        assert command.wait() == 143
        assert "worker 1 was ended by SIGTERM" in command.err
        until(lambda: not Path(f"/proc/{worker}").exists(), 40, lambda: serving.err)


OTHER = """
import runpy, sys
from thinpipe.train import versions
here = versions.versions
versions.versions = lambda: here() | {{{package!r}: {version!r}}}
sys.argv = ["thinpipe", "serve", "--listen", "127.0.0.1:0", "--name", "old"]
runpy.run_module("thinpipe", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("package", "version"), [("thinpipe", "0.1.9"), ("torch", "2.3.1+cu121"), ("transformers", "4.1.0")]
)
def test_servers_of_other_versions_are_rejected_before_the_first_step(
    package: str, version: str, tmp_path: Path
) -> None:
    with machines(tmp_path, "client", "server") as (client, server):
        serving = server.type(command=("-c", OTHER.format(package=package, version=version)))
        options = ["--config", "gpt2", "--data", str(Path(__file__))] if package == "transformers" else DIGITS
        command = train(client, *options, "--servers", serving.ticket())
        assert command.wait() == 2
        line = command.err.splitlines()[-1]
        assert line.startswith("thinpipe: worker 1 (old): versions differ: " + package), command.err
        assert version in line


def test_too_little_memory_for_a_stage_is_one_line_before_the_first_step(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "server") as (client, server):
        serving = server.type("serve", "--listen", "127.0.0.1:0", "--memory", "100MB", "--name", "small")
        (client.folder / "a.txt").write_text("a client keeps the first and the last layers of a model " * 100)
        sizes = "hidden_size=512,num_hidden_layers=4,num_attention_heads=8,num_key_value_heads=8,intermediate_size=2048"
        options = ["--config", "llama", "--config-set", sizes, "--data", "a.txt", "--vocabulary", "300"]
        command = train(client, *options, "--tokens", "16", "--samples", "16", "--servers", serving.ticket())
        assert command.wait() == 2
        line = command.err.splitlines()[-1]
        assert line.startswith("thinpipe: the stages of worker 1, "), command.err
        assert "and this process may have 100 MB" in line


def test_a_run_that_needs_more_memory_than_the_owner_allows_ends_in_one_line_on_both_sides(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "server") as (client, server):
        serving = server.type("serve", "--listen", "127.0.0.1:0", "--memory", "20MB", "--name", "small", "--once")
        large = ["--samples", "1024", "--batch-size", "512", "--chunks", "1", "--image-size", "32", "--epochs", "9"]
        command = train(client, *large, "--servers", serving.ticket())
        assert command.wait() == 1
        line = r"worker 1 was ended: it used [\d.]+ MB of memory, and small allows 20 MB; take smaller batches"
        command.shows(line)
        assert serving.wait() == 1
        assert re.search(line, serving.err), serving.err


def test_only_allowed_keys_are_admitted_and_peers_lists_them(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "other", "server") as (client, other, server):
        keys = client.type("peers")
        assert keys.wait() == 0
        key = re.search(r"[A-Za-z0-9+/]{43}", keys.out)
        assert key, keys.out
        serving = server.type("serve", "--listen", "127.0.0.1:0", "--threads", "1", "--allow", key[0], "--once")
        stranger = train(other, *DIGITS, "--servers", serving.ticket())
        assert stranger.wait() == 2
        assert "its owner does not allow this key" in stranger.err
        command = train(client, *DIGITS, "--servers", serving.ticket())
        assert command.wait() == serving.wait() == 0, command.err + serving.err
        known = server.type("peers")
        assert known.wait() == 0
        assert re.search(re.escape(key[0]) + r"\s+" + re.escape(socket.gethostname()), known.out), known.out
        log = (server.folder / "key" / "serve.log").read_text()
        assert re.search(r"^20\d\d-\S+Z run \w{8} \(train\) of \S+ \(" + re.escape(key[0][:12]), log, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--servers", "thinpipe://gpu.example:7000/abc"], "the code of a ticket"),
        (["--servers", "gpu.example:7000"], "a ticket is thinpipe://HOST:PORT/CODE"),
        (["--listen", "127.0.0.1:0"], "--workers N, the client included"),
        (["--listen", "127.0.0.1:0", "--workers", "2", "--rank", "0"], "leave out --rank"),
        (["--listen", "127.0.0.1:0", "--workers", "2", "--link", "1mbit"], "leave out --link"),
        (["--listen", "127.0.0.1:0", "--workers", "2", "--layout", "linear"], "--layout client-server"),
        (["--listen", "127.0.0.1:0", "--workers", "2", "--parallel", "data"], "--layout client-server"),
        (["--listen", "127.0.0.1:0", "--workers", "2", "--task", "tests.train.toy:ToyTask"], "servers run no code"),
        (["--listen", "nowhere.invalid:1", "--workers", "2"], "an address of this machine and a free port"),
        (["--address", "gpu.example", "--servers", "x"], "--address is the address in the ticket of --listen"),
    ],
)
def test_options_that_contradict_each_other_are_one_line(options: list[str], problem: str, tmp_path: Path) -> None:
    with machines(tmp_path, "client") as (client,):
        command = train(client, "--chunks", "2", *options)
        assert command.wait() == 2
        (line,) = command.err.splitlines()
        assert problem in line


def test_a_server_that_does_not_answer_is_named_after_the_patience(tmp_path: Path, lab: list[Machine]) -> None:
    ticket = ticket_of(lab).split("/")
    closed = "/".join([*ticket[:2], "127.0.0.1:9", *ticket[3:]])
    command = train(lab[0], *DIGITS, "--servers", closed, "--patience", "2")
    assert command.wait() == 1
    assert "127.0.0.1:9 does not answer" in command.err.splitlines()[-2]


def test_fewer_servers_than_workers_end_the_wait_with_their_number(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "server") as (client, server):
        options = ["--listen", "127.0.0.1:0", "--workers", "3", "--patience", "2"]
        command = train(client, *DIGITS, *options)
        serving = server.type("serve", command.ticket(), "--once")
        assert command.wait() == 1
        assert "of 2 servers have come within 20 s" in command.err.splitlines()[-2]
        serving.shows("has given up|has closed the connection")


def test_a_server_without_ticket_and_address_says_what_it_needs() -> None:
    assert sys.executable  # of the fixture-less command below
    with machines(Path(os.environ.get("TMPDIR", "/tmp")), "thinpipe-serve-alone") as (server,):
        command = server.type("serve")
        assert command.wait() == 2
        assert "thinpipe serve TICKET" in command.err
