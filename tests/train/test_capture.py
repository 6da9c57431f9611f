"""--capture: what crosses the links, as it is before a codec sees it, in a file that bench codecs reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.pool import Pool
from tests.train.toy import FEATURES, Recorder, ToyTask, run_toy, settings_for, train_toy, world_in
from thinpipe.lab.bench.codecs.synthetic import cases_from_file
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.worker import train

ROWS = 6  # of a chunk: batches of 18 in 3 chunks; 8 steps in all


def captured(pool: Pool, path: Path, given: dict[str, Any] | None = None, workers: int = 2, **asked: Any) -> Any:
    running = RunOptions(capture=Capture(path=path, **asked))
    pool.run(train_toy, workers, "plain", running, given or {})
    return load_file(path)


def test_every_link_and_direction_under_its_name(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    found = captured(pool, path, {"compress": "sort:8"}, workers=3)
    ends = ["forward/0-1", "forward/1-2", "forward/2-3", "backward/1-0", "backward/2-1", "backward/3-2"]
    assert set(found) == {f"{end}/0/step{step:06d}/chunk0" for end in ends for step in (1, 4, 8)}
    assert {tuple(tensor.shape) for tensor in found.values()} == {(ROWS, FEATURES)}
    assert sorted(case.content for case in cases_from_file(path)) == sorted(found)
    assert [each.name for each in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.parametrize("layout", ["client-server", "linear"])
def test_tensors_are_those_of_the_model_not_those_of_the_codec(pool: Pool, tmp_path: Path, layout: str) -> None:
    """The first step's output of the first stage depends on the initial weights alone, whatever the codec."""
    path, name = tmp_path / "run.safetensors", "forward/0-1/0/step000001/chunk{}"
    rough = captured(pool, path, {"compress": "uniform:1", "layout": layout}, steps=(1,), chunks=3)
    exact = captured(pool, path, {"compress": "none", "layout": layout}, steps=(1,), chunks=3)
    for chunk in range(3):
        assert torch.equal(rough[name.format(chunk)], exact[name.format(chunk)])
        assert len(rough[name.format(chunk)].unique()) > 100  # a codec of one bit leaves two values
    assert set(rough) == set(exact)


def test_capturing_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    running = RunOptions(capture=Capture(path=tmp_path / "run.safetensors"))
    watched, alone = (pool.run(train_toy, 2, "dropout", each, {})[0] for each in (running, RunOptions()))
    assert watched.end.parameters_sha256 == alone.end.parameters_sha256


def test_a_resumed_run_keeps_earlier_captures(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    asked = Capture(path=path, steps=(2, 7))
    pool.run(train_toy, 2, "plain", RunOptions(capture=asked), {})
    whole = load_file(path)
    path.unlink()
    pool.run(
        train_toy, 2, "plain", RunOptions(capture=Capture(path=path, steps=(2,)), save=tmp_path / "a", steps=4), {}
    )
    rest = RunOptions(capture=asked, resume=tmp_path / "a" / "step-00000004")
    pool.run(train_toy, 2, "plain", rest, {})
    again = load_file(path)
    assert set(again) == set(whole)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def refusal(group: Any, running: RunOptions) -> str:
    try:
        run_toy(group, ToyTask(), running)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"steps": (3, 9)}, "this run ends with step 8, capture_steps asks for 9"),
        ({"chunks": 4}, "a step has 3 chunks, capture_chunks asks for 4"),
        ({"limit": 10_000}, "capture would write 73.73 kB: 3 steps, 1 chunks of each, 24.58 kB a chunk"),
    ],
)
def test_impossible_captures_are_rejected_on_all_workers(
    pool: Pool, tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    running = RunOptions(capture=Capture(path=tmp_path / "run.safetensors", **asked))
    for error in pool.run(refusal, 2, running):
        assert message in error
    assert not list(tmp_path.iterdir())


def required_space(group: Any, running: RunOptions) -> list[Mapping[str, int]]:
    asked: list[Mapping[str, int]] = []
    task = ToyTask()
    with patch("thinpipe.train.worker.check_space", lambda paths, sizes: asked.append(sizes)):
        train(task, settings_for(task, group), running, world_in(group), Recorder)
    return asked


def test_space_is_required_for_the_new_file_in_addition_to_the_old(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    running = RunOptions(capture=Capture(path=path), export=tmp_path / "model")
    client, server = pool.run(required_space, 2, running)
    exported = (tmp_path / "model" / "model.safetensors").stat().st_size
    captured = 2 * sum(tensor.nbytes for tensor in load_file(path).values())
    assert client == [{"save": 0, "capture": captured, "export": exported}]
    assert server == []


def test_steps_that_are_past_are_refused_unless_the_file_has_them(pool: Pool, tmp_path: Path) -> None:
    pool.run(train_toy, 2, "plain", RunOptions(save=tmp_path / "saved", steps=4), {})
    asked = Capture(path=tmp_path / "run.safetensors", steps=(2, 6))
    running = RunOptions(capture=asked, resume=tmp_path / "saved" / "step-00000004")
    assert "this run goes on after step 4, capture_steps asks for step 2" in pool.run(refusal, 2, running)[1]


def test_options_are_checked_before_there_are_workers() -> None:
    with pytest.raises(ValueError, match=r"capture writes FILE\.safetensors; got run\.pt"):
        Capture(path=Path("run.pt"))
    with pytest.raises(ValueError, match="capture_steps is steps counted from 1; got 0"):
        Capture(path=Path("run.safetensors"), steps=(0, 3))
