"""Every command and code block of the README runs: two of them for real, the others until workers would start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from tests.documents import ROOT, blocks, commands
from tests.pool import Pool
from tests.scripts import run_script
from thinpipe.cli import app
from thinpipe.measure.network import missing_for_networks
from thinpipe.pipeline import launch

README = ROOT / "README.md"
COMMANDS = [" ".join(words) for words in commands(README)]
PYTHON = [block.text for block in blocks(README) if block.language == "python"]

TINY = "--samples 64 --epochs 1 --batch-size 16 --image-size 16 --threads 1"
TRAINED = "thinpipe train --task digits --save runs/a --log runs/curves --json a.json"
ADDED = {  # words that make a command small enough to run here, in this process
    "thinpipe ablate": "--dry-run",
    "thinpipe bench codecs": "--shape 2,24,8,8 --repeat 1 --budget 0.01 --reference none",
    "thinpipe diff": "",
    "thinpipe train --resume": "",
}
WITHOUT = {"--task images": "--no-pretrained"}  # of what only a network has: weights
NOT_RUN = {
    "make demo": "makes a virtual environment and trains for half a minute; its target is `thinpipe train`",
}


class Started(Exception):
    """Options were accepted, data and outputs looked for: workers would start now."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the first command of the tour ran, and what the others find there."""
    directory = tmp_path_factory.mktemp("readme")
    words = TRAINED.replace("runs/", f"{directory}/runs/").replace("a.json", f"{directory}/a.json").split()
    code, output = run_script("-m", *words, *TINY.split())
    assert code == 0, output
    assert "Where the time of a step goes" in output
    shutil.copy(directory / "a.json", directory / "b.json")
    shutil.copytree(ROOT / "ablations", directory / "ablations")
    for number in range(20):
        path = directory / "photos" / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    return directory


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) > 10
    assert TRAINED in COMMANDS
    assert set(NOT_RUN) <= set(COMMANDS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in {TRAINED, *NOT_RUN}])
def test_command(command: str, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--link" in command and (missing := missing_for_networks()):
        pytest.skip(missing)
    monkeypatch.chdir(trained)

    def start(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr(launch, "run_workers", start)
    added = next((words for prefix, words in ADDED.items() if command.startswith(prefix)), None)
    missing_here = "".join(words for part, words in WITHOUT.items() if part in command)
    result = CliRunner().invoke(app, [*command.split()[1:], *(added or "").split(), *missing_here.split()])
    if added is None:
        assert isinstance(result.exception, Started), result.output
    else:
        assert result.exit_code == 0, result.output


def test_targets_of_make_are_there() -> None:
    targets = (ROOT / "Makefile").read_text()
    for command in COMMANDS:
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in targets


def run_stage(group: Any, block: str) -> float:
    """The block about stages on one worker: in a process group that is there, with a module and data of its own."""
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


def test_the_codec_block_says_the_sizes_it_makes() -> None:
    block = next(text for text in PYTHON if "encode" in text)
    names: dict[str, Any] = {}
    exec(block, names)
    assert f"{names['wire'].numel()} bytes of {names['x'].nbytes}" in block
    assert (names["y"] - names["x"]).abs().max() < 0.5


def test_every_block_is_run() -> None:
    assert len(PYTHON) == 2
