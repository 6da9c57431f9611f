"""Uncompressed, a pipeline computes what one process does: every gradient, and the loss over many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pipeline.models import batch, reference, seeded
from tests.pipeline.pipelines import make, run_step, twins
from tests.pool import Pool

CHUNKS = (1, 2, 4, 8, 16)


def follow(group: Any, layout: str, order: str, chunks: int) -> None:
    """Twenty optimizer steps beside the same in one process; gradients are compared in the first and the last."""
    piped, plain = seeded(), seeded()
    stages, schedule = make(group, layout, order, chunks, piped)
    mine = [(p, q) for stage in stages for p, q in twins(stage.submod, piped, plain)]
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


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("layout", ["linear", "client-server"])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_gradients_and_losses_equal_one_process(pool: Pool, layout: str, order: str, workers: int, chunks: int) -> None:
    pool.run(follow, workers, layout, order, chunks)
