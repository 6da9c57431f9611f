"""Uncompressed, a pipeline computes what one process does: every gradient, and the loss over many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pipeline.models import batch, reference, seeded
from tests.pipeline.pipelines import make, run_step, twins
from tests.pool import Pool

STEPS = 6
# Chunks, workers, order, layout: every pair of them, and every order in every layout with each number of either.
CASES = [
    (1, 2, "1f1b", "client-server"),
    (1, 2, "gpipe", "linear"),
    (1, 3, "gpipe", "client-server"),
    (1, 4, "1f1b", "linear"),
    (2, 2, "1f1b", "client-server"),
    (2, 2, "gpipe", "linear"),
    (2, 3, "1f1b", "linear"),
    (2, 4, "gpipe", "client-server"),
    (4, 2, "1f1b", "linear"),
    (4, 3, "1f1b", "client-server"),
    (4, 3, "gpipe", "client-server"),
    (4, 4, "gpipe", "linear"),
    (8, 2, "gpipe", "client-server"),
    (8, 3, "1f1b", "client-server"),
    (8, 3, "gpipe", "linear"),
    (8, 4, "1f1b", "linear"),
    (16, 2, "1f1b", "linear"),
    (16, 3, "gpipe", "client-server"),
    (16, 4, "1f1b", "client-server"),
    (16, 4, "gpipe", "linear"),
]


def follow(group: Any, layout: str, order: str, chunks: int) -> None:
    """Optimizer steps next to the same in one process; gradients are compared in the first and the last."""
    piped, plain = seeded(), seeded()
    stages, schedule = make(group, layout, order, chunks, piped)
    mine = [(p, q) for stage in stages for p, q in twins(stage.submod, piped, plain)]
    ours = torch.optim.SGD([p for p, _ in mine], lr=0.5)
    theirs = torch.optim.SGD([q for unit in plain for q in unit.parameters()], lr=0.5)
    for step in range(STEPS):
        x, y = batch(seed=step)
        ours.zero_grad()
        theirs.zero_grad()
        expected = reference(plain, x, y, chunks)
        loss = run_step(stages, schedule, x, y)
        if loss is not None:
            assert abs(loss - expected) <= 1e-5 * expected, (step, loss, expected)
        if step in (0, STEPS - 1):
            assert mine
            for p, q in mine:
                assert p.grad is not None
                error = float((p.grad - q.grad).norm() / q.grad.norm())
                assert error <= 1e-5, (step, error)
        ours.step()
        theirs.step()


@pytest.mark.parametrize(("chunks", "workers", "order", "layout"), CASES)
def test_gradients_and_losses_equal_one_process(pool: Pool, chunks: int, workers: int, order: str, layout: str) -> None:
    pool.run(follow, workers, layout, order, chunks)
