"""Pipelines of the small models, as a user would write them; run inside the workers of a pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.pipeline.models import cut
from thinpipe.pipeline import ClientServerSchedule, LinearSchedule, PipelineStage


def make(group: Any, layout: str, order: str, chunks: int, units: list[nn.Module], **options: Any) -> tuple[Any, Any]:
    """This worker's stages and the schedule, as a user would write them."""
    worker, workers = group.rank(), group.size()
    count = workers + (layout == "client-server")
    modules = cut(units, count)
    options = {"forward": "none", "backward": "none"} | options
    stages = [
        PipelineStage(modules[index], index, count, "cpu", group=group, **options)
        for index in range(worker, count, workers)
    ]
    loss = nn.functional.mse_loss
    if layout == "client-server":
        return stages, ClientServerSchedule(stages, chunks, loss, order=order)
    return stages, LinearSchedule(stages[0], chunks, loss, order=order)


def run_step(stages: Any, schedule: Any, x: torch.Tensor, y: torch.Tensor) -> float | None:
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    losses: list[torch.Tensor] = []
    schedule.step(*([x] if first else []), target=y if last else None, losses=losses)
    return float(torch.stack(losses).mean()) if last else None


def twins(module: nn.Module, piped: list[nn.Module], plain: list[nn.Module]) -> list[Any]:
    """The parameters of a stage, each with its twin in the model that runs in one process."""
    parameters = zip(nn.Sequential(*piped).parameters(), nn.Sequential(*plain).parameters(), strict=True)
    twin = {id(p): q for p, q in parameters}
    return [(p, twin[id(p)]) for p in module.parameters()]
