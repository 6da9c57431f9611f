"""Differences between workers are found before the first tensor travels, and named on every worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from tests.pipeline.models import WIDTH, batch, seeded
from tests.pool import Pool
from thinpipe.pipeline import ClientServerSchedule, PipelineStage


def start(group: Any, difference: str) -> str:
    """The error of a first step for which worker 1 was set up differently."""
    worker = group.rank()
    odd = worker == 1
    module = seeded(2)[worker]
    x, y = batch(16)
    options: dict[str, Any] = {"group": group}
    if difference == "codecs":
        options["backward"] = "uniform:4" if odd else "uniform:8"
    if difference == "model and cuts":
        module.plan = f"MobileNetV2 cut at {10 + worker}"
    if difference == "shapes":
        example = torch.zeros(4, WIDTH // 2 if odd else WIDTH, requires_grad=True)
        options |= {"input_args": example, "output_args": example}
    try:
        if difference == "number of stages" and not odd:
            stages = [PipelineStage(module, index, 3, "cpu", **options) for index in (0, 2)]
            ClientServerSchedule(stages, 4, nn.functional.mse_loss).step(x, target=y)
        stage = PipelineStage(module, 1 - worker if difference == "place" else worker, 2, "cpu", **options)
        schedule = ScheduleGPipe(stage, 2 if odd and difference == "chunks" else 4, nn.functional.mse_loss)
        schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("codecs", 'backward codec: "uniform:8" on worker 0; "uniform:4" on worker 1'),
        ("number of stages", "number of stages: 3 on worker 0; 2 on worker 1"),
        ("model and cuts", 'model and cuts: "MobileNetV2 cut at 10" on worker 0; "MobileNetV2 cut at 11" on worker 1'),
        ("chunks", "chunks per step: 4 on worker 0; 2 on worker 1"),
        ("shapes", 'from stage 0 to stage 1: ["float32[4, 32]"] on worker 0; ["float32[4, 16]"] on worker 1'),
    ],
)
def test_difference_is_named_on_every_worker(pool: Pool, difference: str, message: str) -> None:
    for error in pool.run(start, 2, difference):
        assert message in error


def test_stage_on_the_wrong_worker(pool: Pool) -> None:
    errors = pool.run(start, 2, "place")
    assert "stage 1 of 2 belongs to worker 1 of 2" in errors[0]
    assert "make stage 0 here" in errors[0]
    assert "make stage 1 here" in errors[1]
