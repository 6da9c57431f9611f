"""Crowding: the costs of workers on one machine, from measured steps, and the measurement itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lab.plan.profiles import profile
from tests.pool import Pool
from tests.train.toy import ToyTask, world_in
from thinpipe.lab.plan.crowding import crowd, crowded_ms
from thinpipe.lab.plan.model import PlannedModel
from thinpipe.lab.plan.network import LinkTimes, measured_cluster
from thinpipe.lab.plan.planning import crowded_step, settings_of
from thinpipe.lab.plan.predictor import Candidate, Predictor
from thinpipe.lab.plan.profile import ModelProfile, profile_units
from thinpipe.launch.workers import run_workers
from thinpipe.train.tasks.task import Source

BATCH, SAMPLES, CHUNKS = 32, 4, 8
ALONE_MS = {1: 10.0, 2: 11.0, 3: 15.0}
FREE = LinkTimes(up_ms=0.0, up_mbit_per_s=1e6, down_ms=0.0, down_mbit_per_s=1e6)


def measured(**facts: Any) -> ModelProfile:
    """Return six units of 1 ms forward and 2 ms backward for four samples."""
    made = profile(6)
    units = [replace(unit, forward_ms=[(SAMPLES, 1.0)], backward_ms=[(SAMPLES, 2.0)]) for unit in made.units]
    return replace(made, units=tuple(units), action_ms=0.5, update_ms=0.0, **facts)


def step_ms(made: ModelProfile, workers: int, cuts: Sequence[int]) -> float:
    shared = measured_cluster(None, workers, FREE, slowdown=made.slowdown)
    pipeline = Candidate(
        parallel="pipeline",
        machines=tuple(range(workers)),
        layout="linear",
        cuts=tuple(cuts),
        schedule="gpipe",
        chunks=CHUNKS,
    )
    return Predictor(made, shared, BATCH).predict(pipeline).step_ms


def test_slowdown_and_actions_are_those_of_the_measured_steps() -> None:
    asked = []

    def run(workers: int, cuts: Sequence[int], samples: int) -> float:
        asked.append((workers, tuple(cuts), samples))
        if not cuts:
            return ALONE_MS[workers]
        slow = [ALONE_MS[count] / ALONE_MS[1] for count in range(1, 4)]
        return step_ms(measured(slowdown=slow), workers, cuts) + 2 * CHUNKS * 0.1 * workers

    found = crowd(measured(), run, 3, BATCH, SAMPLES)
    assert found.slowdown == [1.0, 1.1, 1.5]
    assert found.crowded_action_ms == pytest.approx([0.0, 0.2, 0.3], abs=0.05)  # 0.1 ms of delay a hop
    assert asked == [(1, (), 4), (2, (), 4), (3, (), 4), (2, (3,), SAMPLES), (3, (2, 4), SAMPLES)]
    # A prediction with these costs takes longer by those of the actions of the busiest worker, or more.
    plain = replace(found, crowded_action_ms=())
    assert step_ms(found, 3, (2, 4)) >= step_ms(plain, 3, (2, 4)) + 2 * CHUNKS * 0.27


def test_no_worker_is_faster_with_others() -> None:
    found = crowd(measured(), lambda workers, cuts, samples: 0.001 if cuts else 10.0, 2, BATCH, SAMPLES)
    assert found.slowdown == [1.0, 1.0]
    assert found.crowded_action_ms == [0.0, 0.0]


def test_more_workers_than_units_cannot_be_measured() -> None:
    found = crowd(measured(), lambda workers, cuts, samples: 1000.0 if cuts else 10.0, 8, BATCH, SAMPLES)
    assert len(found.slowdown) == 8
    assert len(found.crowded_action_ms) == 6
    assert Predictor(found, measured_cluster(None, 8, FREE), BATCH).action_ms(
        measured_cluster(None, 8, FREE).machines[0], 8
    ) == pytest.approx(0.5 + found.crowded_action_ms[-1])


def crowded(group: Any, cuts: Sequence[int], samples: int) -> float:
    task = ToyTask()
    data, shape = task.load(Source())
    batch = data.train.batch(torch.arange(BATCH))
    model = PlannedModel(name="toy", model=task.build(shape, Source()), load=None, batch=batch)
    facts = profile_units(*model.cut(3, amp=False), name="toy")
    return crowded_ms(facts, model, world_in(group), cuts, batch_size=BATCH, samples=samples)


@pytest.mark.parametrize("cuts", [(), (3,)])
def test_all_workers_measure_the_same_step(pool: Pool, cuts: Sequence[int]) -> None:
    one, other = pool.run(crowded, 2, cuts, SAMPLES)
    assert one == other > 0


@pytest.mark.parametrize("cuts", [(), (10,)])
def test_the_workers_of_a_plan_take_the_steps_of_its_task(cuts: Sequence[int]) -> None:
    settings = settings_of({"task": "digits", "batch_size": 16, "image_size": 16, "samples": 64, "threads": 1})
    one, other = run_workers(crowded_step, settings, cuts, 8, workers=2)
    assert one == other > 0
