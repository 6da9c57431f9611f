"""Runs with servers on loopback, as commands: the same parameters as a local run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.serve.machines import DIGITS, LIMIT_S, Machine, children_of, listeners_of, machines
from tests.train.tasks.written import write_language_model
from thinpipe.lab.records.record import Record

pytestmark = pytest.mark.timeout(3 * LIMIT_S)
TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60
LM = ["--tokens", "32", "--batch-size", "8", "--chunks", "2", "--samples", "16", "--epochs", "1"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """A client with a model and texts, and two servers that listen."""
    with machines(tmp_path_factory.mktemp("lab"), "client", "one", "two") as found:
        write_language_model(found[0].folder / "llama", TEXT)
        (found[0].folder / "a.txt").write_text(TEXT)
        for each in found[1:]:
            each.type("serve", "--listen", "127.0.0.1:0", "--name", each.folder.name, "--threads", "1")
        yield found


def tickets(lab: list[Machine]) -> str:
    return ",".join(each.commands[0].ticket() for each in lab[1:])


def sha_of(path: Path) -> str:
    return str(Record.read(path).rows[0]["parameters_sha256"])


def train(client: Machine, *options: str, name: str) -> str:
    """Train on the client; the hash of the parameters."""
    command = client.type("train", *options, "--threads", "1", "--json", name)
    assert command.wait() == 0, command.out + command.err
    return sha_of(client.folder / name)


def test_digits_over_listening_servers_end_with_the_parameters_of_a_local_run(lab: list[Machine]) -> None:
    served = train(lab[0], *DIGITS, "--servers", tickets(lab), name="served.json")
    assert served == train(lab[0], *DIGITS, "--workers", "3", name="local.json")
    for each in lab[1:]:
        command = each.commands[0]
        command.shows(r"run \w{8} \(train\) of .* is complete")
        assert "holds units" in command.err
        pids = [command.process.pid, *children_of(command.process.pid)]
        assert len(listeners_of(pids)) == 1


def test_a_language_model_trains_resumes_evaluates_and_generates_with_files_of_the_client_alone(
    lab: list[Machine],
) -> None:
    client, servers = lab[0], ["--servers", tickets(lab)]
    run = ["--model", "llama", "--data", "a.txt", "--lora", "2", *LM]
    saved = ["--save-every", "1", "--save"]
    local = train(client, *run, "--workers", "3", *saved, "run-local", name="lm-local.json")
    assert train(client, *run, *servers, *saved, "run", "--export", "adapter", name="lm.json") == local
    assert len(list((client.folder / "run").glob("step-*/*.safetensors"))) == 6  # two checkpoints of three parts
    first = ["--resume", "run/step-00000001", "--save", "again"]
    assert train(client, *first, *servers, name="resumed.json") == local
    losses = [evaluate(client, "--run", "run", *more) for more in (["--workers", "3"], servers)]
    assert losses[0] == losses[1]
    texts = [generate(client, "--adapter", "adapter", *more) for more in (["--workers", "3"], servers)]
    assert texts[0] == texts[1] != ""
    for each in lab[1:]:
        assert not any(path.suffix in (".txt", ".jsonl") for path in each.folder.rglob("*"))


def evaluate(client: Machine, *options: str) -> object:
    command = client.type("evaluate", *options, "--threads", "1", "--json", "evaluated.json")
    assert command.wait() == 0, command.out + command.err
    return Record.read(client.folder / "evaluated.json").rows[0]["loss"]


def generate(client: Machine, *options: str) -> str:
    command = client.type("generate", *options, "--threads", "1", "--max-new-tokens", "8", "a client keeps")
    assert command.wait() == 0, command.out + command.err
    return command.out
