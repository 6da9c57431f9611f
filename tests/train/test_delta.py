"""delta(...) in training: what it gains, what it counts, and the room its copies take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.pool import Pool
from tests.train.toy import Recorder, ToyTask, run_toy, settings_for, train_toy, world_in
from thinpipe import codec
from thinpipe.links.message import CHECKSUM_BYTES
from thinpipe.links.recv import RecvLink
from thinpipe.train.batches import SampleOrder
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.tasks.tasks import task
from thinpipe.train.worker import train

SPEC = "delta(uniform:2)"


def grammar_received(group: Any, spec: str, path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors received on forward links, under the names of the capture, which has those sent."""
    received, receive = {}, RecvLink.receive

    def note(link: RecvLink, chunk: int) -> list[torch.Tensor]:
        tensors = receive(link, chunk)
        if link.direction == "forward" and torch.is_grad_enabled():
            for index, tensor in enumerate(tensors):
                name = f"forward/{link.source}-{link.target}/{index}/step{link.step:06d}/chunk{chunk}"
                received[name] = tensor.detach().clone()
        return tensors

    options = {"samples": 64, "batch_size": 16, "chunks": 2, "epochs": 2, "lr": 2e-4, "compress_forward": spec}
    grammar = task("grammar")
    settings = settings_for(grammar, group, **options)
    running = RunOptions(capture=Capture(path=path, steps=tuple(range(1, 9)), chunks=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecvLink, "receive", note)
        train(grammar, settings, running, world_in(group), Recorder)
    return received


def errors(pool: Pool, spec: str, path: Path) -> dict[str, float]:
    """Relative error of the activations of the first link, in each pass over the samples."""
    received, sent = pool.run(grammar_received, 2, spec, path)[1], load_file(path)
    passes = {"first": range(1, 5), "second": range(5, 9)}
    sums = {}
    for name, steps in passes.items():
        keys = [f"forward/0-1/0/step{step:06d}/chunk{chunk}" for step in steps for chunk in range(2)]
        wrong = sum(float((received[key] - sent[key]).square().sum()) for key in keys)
        sums[name] = (wrong / sum(float(sent[key].square().sum()) for key in keys)) ** 0.5
    return sums


def test_samples_that_come_again_arrive_better_than_with_the_plain_codec(pool: Pool, tmp_path: Path) -> None:
    """Sentences are not augmented: from one pass to the next activations change only as the weights do."""
    plain = errors(pool, "tile:2", tmp_path / "plain.safetensors")
    delta = errors(pool, "delta(tile:2)", tmp_path / "delta.safetensors")
    assert plain["second"] > 0.1
    assert delta["first"] < 0.05
    assert 0 < delta["second"] < 0.2 * plain["second"]


@pytest.mark.parametrize(
    ("rows", "value_bytes", "given"),
    [pytest.param(6, 4, {}, id="float32"), pytest.param(12, 2, {"amp": True, "batch_size": 36}, id="bfloat16")],
)
def test_bytes_are_those_that_travelled(pool: Pool, rows: int, value_bytes: int, given: dict[str, Any]) -> None:
    """An epoch drops 8 of 80 samples, so the second one still has a few new chunks."""
    first, again = (
        codec(spec).wire_bytes((rows, 256), torch.float32) + CHECKSUM_BYTES for spec in ("uniform:8", "uniform:2")
    )
    batch, per_epoch = 3 * rows, 80 // (3 * rows)
    order, seen, expected = SampleOrder(80, step_samples=batch, seed=0), set[int](), []
    for step in range(2 * per_epoch):
        chunks = [set(chunk) for chunk in order.step(*divmod(step, per_epoch)).view(3, rows).tolist()]
        expected.append(2 * sum(again if chunk <= seen else first for chunk in chunks))
        seen |= set.union(*chunks)
    assert set(expected[:per_epoch]) == {2 * 3 * first}
    assert min(expected) < 2 * 3 * first
    given = {"compress_forward": SPEC, "compress_backward": "none", **given}
    recorder = pool.run(train_toy, 2, "plain", RunOptions(), given)[0]
    gradients = 2 * (batch * 256 * value_bytes + 3 * CHECKSUM_BYTES)
    assert [step.wire_bytes - gradients for step in recorder.steps] == expected
    forward = [link for link in recorder.end.links if link.direction == "forward"]
    assert sum(link.wire_bytes for link in forward) == sum(expected)
    planned = [link for link in recorder.plan.links if link.direction == "forward"]
    assert [link.spec for link in planned] == [SPEC, SPEC]
    assert [(link.first_wire_bytes, link.wire_bytes) for link in planned] == [(3 * first, 3 * again)] * 2
    assert {link.first_wire_bytes for link in recorder.plan.links if link.direction == "backward"} == {None}


def refusal(group: Any, running: RunOptions) -> str:
    try:
        run_toy(group, ToyTask(), running, compress_forward=SPEC)
    except ValueError as error:
        return str(error)
    return ""


def test_more_copies_than_may_be_kept_are_an_error_before_the_first_step(pool: Pool) -> None:
    """Both workers are on this machine: two links, two ends, 80 samples of 256 half floats."""
    room = 2 * 2 * 80 * 256 * 2
    for error in pool.run(refusal, 2, RunOptions(delta_cache_limit=room - 1)):
        assert "163.8 kB on this machine, and delta_cache_limit allows 163.8 kB. Allow more" in error
    assert pool.run(refusal, 2, RunOptions(delta_cache_limit=room)) == ["", ""]


def test_a_place_for_copies_that_cannot_be_is_an_error_on_all_workers(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for error in pool.run(refusal, 2, RunOptions(delta_cache=tmp_path / "file")):
        assert "copies of samples need" in error


def checkpoint_space(group: Any, spec: str) -> int:
    told: list[int] = []
    toy = ToyTask()
    running = RunOptions(save=Path("never"), steps=1)
    settings = settings_for(toy, group, compress_forward=spec)

    def stop(paths: object, sizes: Mapping[str, int]) -> None:
        told.append(sizes["save"])
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"), patch("thinpipe.train.worker.check_space", stop):
        train(toy, settings, running, world_in(group), Recorder)
    return sum(told)


def test_the_size_of_checkpoints_counts_copies_once(pool: Pool) -> None:
    """The same copies are at both ends of a link: one end saves them. Two and the best stay while one is written."""
    more = pool.run(checkpoint_space, 2, SPEC)[0] - pool.run(checkpoint_space, 2, "uniform:2")[0]
    assert more == 4 * 2 * (80 * 256 * 2 + 80)
