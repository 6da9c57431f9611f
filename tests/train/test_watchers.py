"""A disk that does not take a file beside the run: one line, nothing half written, and the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tests.train.toy import ToyTask, run_toy
from thinpipe.train.engines.world import SetupError
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.watchers import replace_or_warn


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: no space\nat x")]
)
def test_a_full_disk_is_one_line_and_keeps_the_old_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    path = tmp_path / "step.png"
    path.write_text("old")
    with replace_or_warn("{trace}", path) as temporary:
        temporary.write_text("half")
        raise error
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"thinpipe: trace {path} is not written, the run goes on: ")
    assert "space" in line
    assert [file.name for file in tmp_path.iterdir()] == ["step.png"]
    assert path.read_text() == "old"


def test_a_removed_directory_is_reported_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gone" / "c.safetensors"
    with replace_or_warn("{capture}", path) as temporary:
        save_file({"a": torch.ones(3)}, temporary)
    assert capsys.readouterr().err.startswith(f"thinpipe: capture {path} is not written, the run goes on: ")


def test_the_temporary_name_ends_as_the_file_does_so_that_writers_know_the_format(tmp_path: Path) -> None:
    with replace_or_warn("{trace}", tmp_path / "step.png") as temporary:
        assert temporary.suffix == ".png"
        temporary.write_text("all")
    assert (tmp_path / "step.png").read_text() == "all"


def test_a_bug_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(KeyError), replace_or_warn("{trace}", tmp_path / "step.png"):
        raise KeyError("bug")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"trace": Path("step.png")}, "trace shows the stages of a pipeline; leave it out with parallel none"),
        ({"capture": Capture(path=Path("c.safetensors"))}, "capture keeps what crosses the links of a pipeline"),
    ],
    ids=["trace", "capture"],
)
def test_replicas_have_nothing_to_watch(asked: dict[str, Any], message: str) -> None:
    """The library says so itself, whoever calls it."""
    with pytest.raises(SetupError, match=message):
        run_toy(None, ToyTask(), RunOptions(**asked, steps=1), parallel="none")
