"""Every command and code block of the README runs, at least until workers would start."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from tests.documents import RECORDS, ROOT, blocks, commands
from tests.pool import Pool
from tests.scripts import run_script
from tests.train.serve.machines import machines
from tests.train.tasks.written import write_language_model
from thinpipe.cli.app import app
from thinpipe.lab.bench.link import transfers
from thinpipe.lab.bench.pipeline import measuring
from thinpipe.lab.netem.network import missing_for_networks
from thinpipe.launch import workers as launch

README = ROOT / "README.md"
COMMANDS = [shlex.join(command) for command in commands(README)]
PYTHON = [block.text for block in blocks(README) if block.language == "python"]

TINY = "--samples 64 --epochs 1 --batch-size 16 --image-size 16 --threads 1"
TOUR = [  # run for real, one after the other, the first one small
    "thinpipe train --task digits --save runs/a --log runs/curves --json a.json",
    "thinpipe train --resume runs/a",
    "thinpipe diff a.json b.json --fail-above 5%",
]
SMALL = {  # run for real with these options added
    "thinpipe ablate": "--dry-run",
    "thinpipe bench codecs": "--shape 2,24,8,8 --repeat 1 --budget 0.01 --reference none",
}
HERE = {"--task images": "--no-pretrained"}  # instead of weights, which only a network has
# Run for real, as two machines on loopback: the server's command, then the client's with its ticket.
MACHINES = [command for command in COMMANDS if "thinpipe serve" in command or "--servers" in command]
GENERATE = next(command for command in COMMANDS if "--adapter" in command)  # after them
NOT_RUN = {
    "make demo": "makes a virtual environment and trains for half a minute; its target is `thinpipe train`",
}


class Started(Exception):
    """Options, data and outputs are valid: workers would start now."""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with plans, results, pictures in two folders, a language model and texts."""
    shutil.copytree(ROOT / "ablations", tmp_path / "ablations")
    for path in RECORDS.glob("*/*results.jsonl"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for number in range(20):
        path = tmp_path / "photos" / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    text = "a client keeps the first and the last layers of a model, servers hold those between them; " * 200
    write_language_model(tmp_path / "model", text)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) > 10
    assert {*TOUR, *NOT_RUN} <= set(COMMANDS)


@pytest.mark.timeout(240)
def test_the_tour_trains_resumes_and_compares(directory: Path) -> None:
    train, resume, diff = ([*shlex.split(command)[1:]] for command in TOUR)
    code, output = run_script("-m", "thinpipe", *train, *TINY.split(), fresh=True)
    assert code == 0, output
    assert "Where the time of a step goes" in output
    assert list((directory / "runs" / "curves").iterdir())

    result = CliRunner().invoke(app, resume)
    assert result.exit_code == 0, result.output
    assert "this run is complete" in result.output

    shutil.copy(directory / "a.json", directory / "b.json")
    result = CliRunner().invoke(app, diff)
    assert result.exit_code == 0, result.output


SHORT = "--tokens 32 --batch-size 8 --chunks 2 --samples 16 --threads 1"


@pytest.mark.timeout(400)
def test_the_machines_train_adapters_that_generate(directory: Path) -> None:
    """The server has neither the model nor the texts."""
    serve, train = (shlex.split(command)[1:] for command in MACHINES)
    with machines(directory / "machines", "server", "client") as (server, client):
        where = [word.replace("0.0.0.0:7000", "127.0.0.1:0") for word in serve]
        ticket = server.type(*where, "--threads", "1").ticket()
        command = [word.replace("TICKET", ticket) for word in train]
        trained = client.type(*command, *SHORT.split(), cwd=directory)
        assert trained.wait() == 0, trained.err
    code, output = run_script("-m", *shlex.split(f"{GENERATE} --max-new-tokens 2 --threads 1"))
    assert code == 0, output
    assert "2 tokens" in output


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command not in {*TOUR, *MACHINES, GENERATE, *NOT_RUN}]
)
def test_command(command: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--link" in command and (missing := missing_for_networks()):
        pytest.skip(missing)

    def start(*_: object, **__: object) -> None:
        raise Started

    for module in (launch, measuring, transfers):  # all that have it by its name, imported before it is replaced
        monkeypatch.setattr(module, "run_workers", start)
    small = next((options for prefix, options in SMALL.items() if command.startswith(prefix)), None)
    here = "".join(options for part, options in HERE.items() if part in command)
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], *(small or "").split(), *here.split()])
    if small is None:
        assert isinstance(result.exception, Started), result.output
    else:
        assert result.exit_code == 0, result.output


def test_targets_of_make_are_there() -> None:
    targets = (ROOT / "Makefile").read_text()
    for command in COMMANDS:
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in targets


def run_stage(group: Any, block: str) -> float:
    """Run the block about stages on one worker, with a module and data of its own."""
    rank, world_size = group.rank(), group.size()
    chunk = torch.zeros(8, 256, requires_grad=True)
    names: dict[str, Any] = {
        "module": nn.Linear(256, 256),
        "rank": rank,
        "world_size": world_size,
        "device": torch.device("cpu"),
        "chunk": chunk,
        "loss_fn": nn.functional.mse_loss,
        "inputs": [torch.randn(32, 256)] if rank == 0 else [],
        "labels": torch.randn(32, 256) if rank == world_size - 1 else None,
    }
    exec(block, names)
    counts = [link.counters() for link in names["stage"].links]
    return sum(count.tensor_bytes for count in counts) / sum(count.wire_bytes for count in counts)


def test_the_six_lines_train_and_compress(pool: Pool) -> None:
    block = next(text for text in PYTHON if "PipelineStage" in text)
    assert len([line for line in block.splitlines() if line]) <= 6
    assert min(pool.run(run_stage, 4, block)) > 3.5


def test_the_codec_block_has_the_sizes_it_makes() -> None:
    block = next(text for text in PYTHON if "encode" in text)
    names: dict[str, Any] = {}
    exec(block, names)
    assert f"{names['wire'].numel()} bytes of {names['x'].nbytes}" in block
    assert (names["y"] - names["x"]).abs().max() < 0.5


def test_every_block_is_run() -> None:
    assert len(PYTHON) == 2
