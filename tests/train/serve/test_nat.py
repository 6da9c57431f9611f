"""The two commands of the README between machines behind NAT, in network namespaces; all bytes between are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.train.serve.machines import DIGITS, LIMIT_S, Command, Machine, machines
from tests.train.serve.nat import LACKS, Place, internet
from tests.train.tasks.written import write_language_model
from thinpipe.lab.records.record import Record

pytestmark = [
    pytest.mark.skipif(LACKS is not None, reason=f"no {LACKS} here"),
    pytest.mark.timeout(16 * LIMIT_S),
]
TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60
LM = ["--model", "llama", "--data", "a.txt", "--lora", "2", "--tokens", "32", "--batch-size", "8", "--chunks", "2"]
LM += ["--samples", "16", "--epochs", "1"]
# What would be readable if it was not encrypted: options, names of tensors, settings, the data, versions of packages.
READABLE = ["compress_forward", "batch_size", "self_attn", "embed_tokens", "q_proj", "layers.", "llama", "digits"]
READABLE += ["servers hold those", "thinpipe", "torch", "lora", "sha256", "worker"]
COMMANDS = [
    ("train", *DIGITS, "--json", "digits.json"),
    ("train", *LM, "--save", "run", "--export", "adapter", "--json", "lm.json"),
    ("evaluate", "--run", "run", "--json", "evaluated.json"),
    ("generate", "--adapter", "adapter", "--max-new-tokens", "8", "a client keeps"),
]


def write_files(client: Machine) -> None:
    write_language_model(client.folder / "llama", TEXT)
    (client.folder / "a.txt").write_text(TEXT)


def results(client: Machine, texts: str) -> tuple[str, str, float, str]:
    digits, lm, evaluated = (
        Record.read(client.folder / name).rows[0] for name in ("digits.json", "lm.json", "evaluated.json")
    )
    return str(digits["parameters_sha256"]), str(lm["parameters_sha256"]), float(evaluated["loss"]), texts


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, float, str]:
    """Return the results of three workers of one machine, over gloo."""
    with machines(tmp_path_factory.mktemp("local"), "client") as (client,):
        write_files(client)
        for words in COMMANDS:
            command = client.type(*words, "--workers", "3", "--threads", "1")
            assert command.wait() == 0, command.err
        return results(client, client.commands[-1].out)


def check_recording(recording: Path) -> None:
    """Raise AssertionError if anything readable has passed."""
    passed = recording.read_bytes()
    assert len(passed) > 1_000_000
    assert passed.count(b"plain text of a test") >= 1  # what is readable is found
    found = [word for word in READABLE if word.encode() in passed]
    assert found == []


def send_plain_text(source: Place) -> None:
    """Send what a recording must find, to all machines of the bridge."""
    lines = [
        "import socket",
        "s = socket.socket(type=socket.SOCK_DGRAM)",
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)",
        "s.sendto(b'plain text of a test', ('198.51.100.255', 9))",
    ]
    assert source.type(command=("-c", "\n".join(lines))).wait() == 0


def wait_for(command: Command, others: Sequence[Command]) -> str:
    assert command.wait() == 0, "\n".join([command.out, command.err, *(each.err for each in others)])
    return command.out


def test_servers_behind_nat_dial_a_client_with_an_address(tmp_path: Path, local: tuple[str, str, float, str]) -> None:
    with internet(tmp_path, {"client": False, "one": True, "two": True}) as (places, recording):
        client, *servers = places.values()
        write_files(client)
        send_plain_text(client)
        serving: list[Command] = []
        for words in COMMANDS:
            options = ["--listen", f"{client.address}:7000", "--workers", "3", "--threads", "1"]
            command = client.type(*words, *options)
            # They stay: the key of each is known when the next run of this client listens at the same address.
            serving = serving or [each.type("serve", command.ticket(), "--threads", "1") for each in servers]
            command.shows("worker 2 .* is here")
            assert client.listeners() == [f"{client.address}:7000"]
            assert [each.listeners() for each in servers] == [[], []]
            texts = wait_for(command, serving)
            assert "workers 1 and 2 do not reach each other" in command.err
        assert results(client, texts) == local
        check_recording(recording)


def test_a_client_behind_nat_dials_servers_with_an_address(tmp_path: Path, local: tuple[str, str, float, str]) -> None:
    with internet(tmp_path, {"client": True, "one": False, "two": False}) as (places, recording):
        client, *servers = places.values()
        write_files(client)
        send_plain_text(servers[0])
        serving = [each.type("serve", "--listen", "0.0.0.0:7000", "--threads", "1") for each in servers]
        tickets = [each.ticket() for each in serving]
        assert [each.split("/")[2] for each in tickets] == [f"{each.address}:7000" for each in servers]
        for words in COMMANDS:
            command = client.type(*words, "--servers", ",".join(tickets), "--threads", "1")
            command.shows("worker 2 .* is here")
            assert client.listeners() == []
            assert [each.listeners() for each in servers] == [["0.0.0.0:7000"]] * 2
            texts = wait_for(command, serving)
            assert "reach each other" not in command.err  # they do, and are not relayed
        assert results(client, texts) == local
        check_recording(recording)


def test_a_server_behind_nat_that_others_cannot_reach_is_relayed_although_it_listens(tmp_path: Path) -> None:
    """The client dials both; one of them lets in the client only, as a firewall would."""
    with internet(tmp_path, {"client": False, "one": False, "two": False}) as (places, _):
        client, one, two = places.values()
        for each in (one, two):
            each.let_in(client.address)
        serving = [each.type("serve", "--listen", "0.0.0.0:7000", "--threads", "1") for each in (one, two)]
        tickets = ",".join(each.ticket() for each in serving)
        command = client.type("train", *DIGITS, "--servers", tickets, "--threads", "1")
        wait_for(command, serving)
        assert "workers 1 and 2 do not reach each other: their traffic passes through here" in command.err
