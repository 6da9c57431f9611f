"""Uncompressed, a pipeline computes what one process does: every gradient, and the loss over many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batch, cut, reference, seeded
from pool import Pool
from torch import nn

from thinpipe.pipeline import ClientServerSchedule, LinearSchedule, PipelineStage

CHUNKS = (1, 2, 4, 8, 16)


def make(group: Any, layout: str, order: str, chunks: int, units: list[nn.Module], **options: Any) -> tuple[Any, Any]:
    """This worker's stages and the schedule, as a user would write them."""
    worker, workers = group.rank(), group.size()
    count = workers + (layout == "client-server")
    modules = cut(units, count)
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


def follow(group: Any, layout: str, order: str, chunks: int) -> None:
    """Twenty optimizer steps beside the same in one process; gradients are compared in the first and the last."""
    piped, plain = seeded(), seeded()
    stages, schedule = make(group, layout, order, chunks, piped)
    mine = [(p, q) for stage in stages for p, q in _pairs(stage.submod, piped, plain)]
    ours = torch.optim.SGD([p for p, _ in mine], lr=0.5)
    theirs = torch.optim.SGD([q for unit in plain for q in unit.parameters()], lr=0.5)
    for step in range(20):
        x, y = batch(seed=step)
        ours.zero_grad()
        theirs.zero_grad()
        expected = reference(plain, x, y, chunks)
        loss = run_step(stages, schedule, x, y)
        if loss is not None:
            assert abs(loss - expected) <= 1e-5 * expected, (step, loss, expected)
        if step in (0, 19):
            assert mine
            for p, q in mine:
                assert p.grad is not None
                error = float((p.grad - q.grad).norm() / q.grad.norm())
                assert error <= 1e-5, (step, error)
        ours.step()
        theirs.step()


def _pairs(module: nn.Module, piped: list[nn.Module], plain: list[nn.Module]) -> list[Any]:
    """The parameters of a stage, each with its twin in the model that runs in one process."""
    parameters = zip(nn.Sequential(*piped).parameters(), nn.Sequential(*plain).parameters(), strict=True)
    twin = {id(p): q for p, q in parameters}
    return [(p, twin[id(p)]) for p in module.parameters()]


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("layout", ["linear", "client-server"])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_gradients_and_losses_equal_one_process(pool: Pool, layout: str, order: str, workers: int, chunks: int) -> None:
    pool.run(follow, workers, layout, order, chunks)
