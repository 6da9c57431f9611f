"""Runs that lose servers and continue: to the parameters of an undisturbed run, and nobody starts anything again."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.train.serve.machines import LIMIT_S, Command, Machine, children_of, machines
from tests.train.tasks.written import write_language_model
from thinpipe.lab.records.record import Record

pytestmark = pytest.mark.timeout(4 * LIMIT_S)
DIGITS = ["--samples", "64", "--batch-size", "32", "--chunks", "2", "--epochs", "20", "--image-size", "16"]
TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60
LM = ["--model", "llama", "--data", "a.txt", "--lora", "2", "--tokens", "32", "--batch-size", "8", "--chunks", "2"]
LM += ["--samples", "32", "--epochs", "80", "--compress", "none", "--optimizer", "adamw"]


def serve(machine: Machine, port: str = "0") -> Command:
    return machine.type("serve", "--listen", f"127.0.0.1:{port}", "--name", machine.folder.name, "--threads", "1")


def serve_again(machine: Machine) -> Command:
    """Start the server of a machine again, at the port that its ticket names."""
    found = re.search(r":(\d+)/", machine.commands[0].ticket())
    assert found
    return serve(machine, found[1])


def kill(serving: Command, *, all_of_it: bool) -> None:
    """Kill the process of the run on a server, or the server with all that it has started."""
    children = children_of(serving.process.pid)
    workers = [each for child in children for each in children_of(child)]
    for pid in [serving.process.pid, *children] if all_of_it else workers[:1]:
        os.kill(pid, signal.SIGKILL)


def train(client: Machine, *options: str, name: str) -> Command:
    return client.type("train", *options, "--threads", "1", "--json", name)


def sha_of(client: Machine, command: Command, name: str) -> str:
    assert command.wait() == 0, command.out + command.err
    return str(Record.read(client.folder / name).rows[0]["parameters_sha256"])


def tickets(*serving: Command) -> list[str]:
    return ["--servers", ",".join(each.ticket() for each in serving), "--mirror-every", "5", "--patience", "20"]


def forms(command: Command, times: int) -> str:
    """Wait until a group trains for the n-th time; return the members of that group, without the client."""
    trains = r"[^\n]*forming client, ([^\n]*) from step \d+\n(?:[^\n]*\n)*?[^\n]*training from step \d+\n"
    return command.shows(rf"(?:{trains}(?:[^\n]*\n)*?){{{times}}}")[1]


def test_a_spare_takes_over_and_a_server_that_was_started_again_returns(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "one", "two", "three") as (client, one, two, three):
        serving = [serve(each) for each in (one, two, three)]
        command = train(client, *DIGITS, "--workers", "3", *tickets(*serving), name="lasting.json")
        command.shows("epoch +6/20")
        assert forms(command, 1) == "server 1 (one), server 2 (two)"
        kill(serving[1], all_of_it=True)
        assert forms(command, 2) == "server 1 (one), server 3 (three)"
        serve_again(two)
        command.shows("epoch +11/20")
        kill(serving[0], all_of_it=False)
        assert "server 3 (three)" in forms(command, 3)
        lasting = sha_of(client, command, "lasting.json")
        assert "server 1 (one): worker 1: killed by signal 9 (SIGKILL) on one" in command.err
        assert lasting == sha_of(client, train(client, *DIGITS, "--workers", "3", name="local.json"), "local.json")


def test_a_server_hands_over_its_state_on_sigterm_and_layers_are_divided_among_those_left(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "one", "two") as (client, one, two):
        write_language_model(client.folder / "llama", TEXT)
        (client.folder / "a.txt").write_text(TEXT)
        serving = [serve(each) for each in (one, two)]
        command = train(client, *LM, *tickets(*serving), "--min-servers", "1", name="lasting.json")
        command.shows("epoch +4/80")
        serving[0].process.send_signal(signal.SIGTERM)
        assert serving[0].wait() == 143
        assert forms(command, 2) == "server 2 (two)"
        command.shows("epoch +7/80")
        serve_again(one)
        forms(command, 3)
        lasting = sha_of(client, command, "lasting.json")
        assert lasting == sha_of(client, train(client, *LM, "--workers", "3", name="local.json"), "local.json")
