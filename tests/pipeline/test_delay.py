"""Delay of links: the schedule that adapts to it, and the warning about those that do not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining import Schedule1F1B as TorchSchedule
from torch.distributed.pipelining import ScheduleGPipe

import thinpipe
from tests.pipeline.models import batch, cut, seeded
from tests.pipeline.pipelines import run_step, twins
from tests.pool import Pool
from thinpipe.comm.group import Group
from thinpipe.pipeline import linked_stage
from thinpipe.pipeline.order import in_flight, needed_in_flight

CHUNKS, STEPS, DELAY_MS = 8, 4, 1e4  # longer than any microbatch here takes


def train(group: Any, kind: str, delay_ms: float, options: Any = ()) -> tuple[list[str], int | None, float]:
    """Return warnings, the microbatches in flight after a few steps, and the largest error of a gradient."""
    measure = linked_stage.delay_ms
    linked_stage.delay_ms = lambda stage: delay_ms
    worker, workers = group.rank(), group.size()
    piped, plain, loss = seeded(4), seeded(4), nn.functional.mse_loss
    module = cut(piped, workers)[worker]
    stage = thinpipe.PipelineStage(module, worker, workers, "cpu", group=group, forward="none", backward="none")
    kinds: dict[str, Any] = {"ours": thinpipe.Schedule1F1B, "torch": TorchSchedule, "gpipe": ScheduleGPipe}
    schedule = kinds[kind](stage, CHUNKS, loss, **dict(options))
    x, y = batch(16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            module.zero_grad()
            run_step([stage], schedule, x, y)
    linked_stage.delay_ms = measure
    loss(nn.Sequential(*plain)(x), y).backward()
    error = max(float((p.grad - q.grad).abs().max()) for p, q in twins(module, piped, plain))
    ours = kind == "ours"
    return (
        [str(each.message) for each in caught if "round trip" in str(each.message)],
        in_flight(schedule.order, workers, CHUNKS) if ours else None,
        error,
    )


@pytest.mark.parametrize(("options", "flying"), [({}, CHUNKS), ({"max_in_flight": 5}, 5)])
def test_more_microbatches_are_in_flight_over_a_delay(pool: Pool, options: dict[str, Any], flying: int) -> None:
    for caught, found, error in pool.run(train, 3, "ours", DELAY_MS, options):
        assert (caught, found) == ([], flying)
        assert error < 1e-6


def test_without_delay_it_is_the_ordinary_order(pool: Pool) -> None:
    assert [(found, error < 1e-6) for _, found, error in pool.run(train, 2, "ours", 0.0)] == [(2, True)] * 2


def test_a_schedule_that_waits_for_round_trips_is_reported_once_by_the_first_worker(pool: Pool) -> None:
    (first, *_), (second, *_) = pool.run(train, 2, "torch", DELAY_MS)
    (line,) = first
    assert "a round trip takes 20000.0 ms" in line
    assert "only 2 microbatches in flight" in line
    assert second == []
    for kind, delay_ms in (("gpipe", DELAY_MS), ("torch", 0.0)):
        assert [caught for caught, *_ in pool.run(train, 2, kind, delay_ms)] == [[], []]


def test_the_delay_is_measured(pool: Pool) -> None:
    assert all(0 < delay < 1e3 for delay in pool.run(measured, 3))


def measured(group: Any) -> float:
    return Group.of(group).delay_ms()


def test_enough_are_in_flight() -> None:
    assert needed_in_flight(2, 0, 10) == 2
    assert needed_in_flight(2, 20, 10) == 6
    assert needed_in_flight(4, 20, 10) == 16
