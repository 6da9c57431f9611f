"""Where nothing upstream of a link is trained no gradient travels over it, and all that is trained learns the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from tests.pipeline.models import batch, cut, seeded
from tests.pipeline.pipelines import make, run_step, twins
from tests.pool import Pool
from thinpipe.pipeline import PipelineStage
from thinpipe.pipeline.report import report

CHUNKS, SAMPLES = 4, 16


def units(count: int, frozen: tuple[int, ...]) -> list[nn.Module]:
    """A small model; ``frozen`` are the stages that are not trained, of as many as there are units."""
    made = seeded(count)
    for index in frozen:
        made[index].requires_grad_(False)
    return made


def learn(group: dist.ProcessGroup, layout: str, order: str, frozen: tuple[int, ...], recompute: bool) -> Any:
    """Links that carried something, and the largest difference of a gradient to the one of one process."""
    count = group.size() + (layout == "client-server")
    mine, plain = units(count, frozen), units(count, frozen)
    stages, schedule = make(group, layout, order, CHUNKS, mine, recompute=recompute)
    x, y = batch(SAMPLES)
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        run_step(stages, schedule, x, y)
    full = nn.Sequential(*plain)
    nn.functional.mse_loss(full(x), y).backward()
    return {(each.source, each.target): each.wire_bytes for each in report(stages)}, _differences(stages, mine, plain)


def _differences(stages: Any, mine: list[nn.Module], plain: list[nn.Module]) -> list[float]:
    found = []
    for stage in stages:
        for here, there in twins(stage.submod, mine, plain):
            assert (here.grad is None) == (there.grad is None)
            if here.grad is not None:
                found.append(float((here.grad - there.grad).abs().max()))
    return found


@pytest.mark.parametrize(
    ("layout", "order", "frozen", "silent", "recompute"),
    [
        ("client-server", "gpipe", (0,), {(1, 0)}, False),
        ("client-server", "1f1b", (0, 3), {(1, 0)}, True),
        ("client-server", "1f1b", (0, 1, 3), {(1, 0), (2, 1)}, False),
        ("client-server", "gpipe", (0, 1, 2), {(1, 0), (2, 1), (3, 2)}, False),
        ("client-server", "gpipe", (1, 2), set(), False),
        ("linear", "1f1b", (0,), {(1, 0)}, False),
        ("linear", "gpipe", (0, 2), {(1, 0)}, True),
    ],
)
def test_no_gradient_is_sent_to_frozen_stages(
    pool: Pool, layout: str, order: str, frozen: tuple[int, ...], silent: set[tuple[int, int]], recompute: bool
) -> None:
    results = pool.run(learn, 3, layout, order, frozen, recompute)
    stages = 4 if layout == "client-server" else 3
    pairs = {(index, index + 1) for index in range(stages - 1)}
    links = results[0][0]
    assert links.keys() == (pairs | {(there, here) for here, there in pairs}) - silent
    assert all(links.values())
    found = [difference for _, differences in results for difference in differences]
    assert found
    assert max(found) < 1e-6


def learn_apart(group: dist.ProcessGroup, schedule_class: Any) -> Any:
    """Schedules that compute gradients of inputs and of weights apart; of four stages the first two are frozen."""
    worker, mine, plain = group.rank(), units(4, (0, 1)), units(4, (0, 1))
    modules = cut(mine, 4)
    where = (worker, 3 - worker) if schedule_class is ScheduleZBVZeroBubble else (worker, worker + 2)
    stages = [
        PipelineStage(modules[index], index, 4, "cpu", group=group, forward="none", backward="none") for index in where
    ]
    schedule = schedule_class(stages, CHUNKS, loss_fn=nn.functional.mse_loss)
    x, y = batch(SAMPLES)
    run_step(stages, schedule, x, y)
    nn.functional.mse_loss(nn.Sequential(*plain)(x), y).backward()
    return _differences(stages, mine, plain)


@pytest.mark.parametrize("schedule_class", [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble])
def test_zero_bubble_schedules(pool: Pool, schedule_class: Any) -> None:
    found = [each for differences in pool.run(learn_apart, 2, schedule_class) for each in differences]
    assert found
    assert max(found) < 1e-6
