"""A number that is not finite stops the run, and the error names where it first appeared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.pool import Pool
from tests.train.toy import Recorder, ToyTask, settings_for, world_in
from thinpipe.train.batches import epoch_order
from thinpipe.train.engines.finite import NotFiniteError
from thinpipe.train.running import RunOptions
from thinpipe.train.worker import train

UNIT = 3  # of six


def break_weight(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[UNIT][0].weight[0, 0] = float("nan")  # type: ignore[index]


def break_gradient(model: nn.Sequential) -> None:
    model[UNIT][0].weight.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[index, union-attr]


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * float("nan")


def break_backward(model: nn.Sequential) -> None:
    model[UNIT].register_forward_hook(lambda module, inputs, output: NanBackward.apply(output))


def message(group: Any, task: ToyTask, given: dict[str, Any]) -> tuple[str, int, bool]:
    """The error on this worker, the steps that were done, and whether the listener heard of it."""
    recorder = Recorder()
    try:
        train(task, settings_for(task, group, **given), RunOptions(), world_in(group), lambda: recorder)
    except NotFiniteError as error:
        return str(error), len(recorder.steps), recorder.error is error
    return "trained", len(recorder.steps), False


@pytest.mark.parametrize("compress", ["none", "sort:8", "power:4"])
def test_a_broken_weight_is_found_in_its_stage(pool: Pool, compress: str) -> None:
    found = pool.run(message, 2, ToyTask(trap=break_weight), {"compress": compress})
    assert [text for text, *_ in found] == [found[0][0]] * 2
    assert "stopped at step 1: the loss is not finite" in found[0][0]
    assert "the output of stage 1 on worker 1, chunk 0" in found[0][0]
    assert found[0][1:] == (0, True)


@pytest.mark.parametrize(("workers", "layout", "stage"), [(3, "linear", 0), (2, "client-server", 0)])
def test_a_broken_sample_is_found_in_its_chunk(pool: Pool, workers: int, layout: str, stage: int) -> None:
    """Batches of 18 in chunks of 6: of the second batch's samples the eighth is in chunk 1."""
    sample = int(epoch_order(80, seed=0, epoch=0)[18 + 7])
    text, steps, _ = pool.run(message, workers, ToyTask(nan_at=sample), {"layout": layout})[0]
    assert "stopped at step 2" in text
    assert f"the output of stage {stage} on worker 0, chunk 1" in text
    assert steps == 1


def test_broken_gradients_with_a_finite_loss_are_found_in_their_stage(pool: Pool) -> None:
    text = pool.run(message, 2, ToyTask(trap=break_gradient), {})[0][0]
    assert "the loss is finite, but not the gradients" in text
    assert "the gradients of stage 1 on worker 1" in text


def test_a_broken_backward_is_found_in_the_stage_nearest_to_the_loss(pool: Pool) -> None:
    text = pool.run(message, 3, ToyTask(trap=break_backward), {"compress": "none"})[0][0]
    assert "the gradient of stage 2 on worker 2, chunk 0" in text


@pytest.mark.parametrize("workers", [1, 2])
def test_one_process_and_replicas_report_the_chunk(pool: Pool, workers: int) -> None:
    sample = int(epoch_order(80, seed=0, epoch=0)[7])
    task = ToyTask(nan_at=sample)
    if workers == 1:
        text = message(None, task, {"parallel": "none", "chunks": 3})[0]
    else:
        text = pool.run(message, 2, task, {"parallel": "data", "chunks": 3})[0][0]
    assert "the output of stage 0 on worker 0, chunk " + ("1" if workers == 1 else "2") in text
