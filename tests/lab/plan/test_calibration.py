"""Calibration of a small model in one process: every unit, codec and size has times, and predictions are plausible."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.train.toy import ToyTask, world_in
from thinpipe.lab.plan.calibration import calibrate
from thinpipe.lab.plan.cluster import Cluster, Machine
from thinpipe.lab.plan.model import PlannedModel
from thinpipe.lab.plan.network import LinkTimes, measured_cluster
from thinpipe.lab.plan.predictor import Candidate, Predictor
from thinpipe.lab.plan.profile import ModelProfile, at, profile_units
from thinpipe.train.shaping import Queue, parse_link
from thinpipe.train.tasks.task import Source

SIZES = (4, 16)
BATCH = 32


def calibrated(group: Any) -> dict[str, Any]:
    task = ToyTask()
    data, shape = task.load(Source())
    batch = data.train.batch(torch.arange(BATCH))
    model = PlannedModel(name="toy", model=task.build(shape, Source()), load=None, batch=batch)
    units, inputs = model.cut(3, amp=False)
    profile = profile_units(units, inputs, name="toy")
    codecs = [("tile:8", "tile:8+zero")]
    return calibrate(profile, model, world_in(group), sizes=SIZES, codecs=codecs).to_json()


@pytest.fixture
def profile(pool: Pool) -> ModelProfile:
    return ModelProfile.from_json(pool.run(calibrated, 1)[0])


def test_all_parts_have_times(profile: ModelProfile) -> None:
    assert len(profile.units) == 6
    for unit in profile.units:
        assert [size for size, _ in unit.forward_ms] == list(SIZES)
        assert all(ms >= 0 for _, ms in (*unit.forward_ms, *unit.backward_ms))
        assert unit.kept_bytes > 0
    assert sum(ms for unit in profile.units for _, ms in unit.forward_ms) > 0
    assert set(profile.codecs) == {"tile:8", "tile:8+zero"}
    assert all(ms > 0 for each in profile.codecs.values() for points in each.values() for _, ms in points)
    assert profile.action_ms is not None
    assert profile.update_ms is not None


def test_a_prediction_of_a_measured_machine(profile: ModelProfile) -> None:
    times = LinkTimes(up_ms=1.0, up_mbit_per_s=9.0, down_ms=1.0, down_mbit_per_s=90.0)
    made = measured_cluster(parse_link("100mbit/10mbit,1ms"), 2, times)
    assert made.path(0, 1).queues == (Queue("0 to 1", 9.0),)
    predictor = Predictor(profile, made, BATCH)
    pipeline = Candidate(parallel="pipeline", machines=(0, 1), chunks=2, layout="linear", cuts=(3,), schedule="gpipe")
    slow = predictor.predict(pipeline)
    # 16 rows of 256 floats: 16 kB in 14.6 ms up, twice, and 1.5 ms down for the last gradient.
    assert slow.step_ms > 2 * 14.5 + 1.4 + 2
    assert slow.bottleneck == "link 0 to 1"
    alone = predictor.predict(Candidate(parallel="none", machines=(0,), chunks=2))
    assert 0 < alone.step_ms < slow.step_ms


def test_queues_of_three_workers_are_as_slow_as_those_of_two() -> None:
    times = LinkTimes(up_ms=6.0, up_mbit_per_s=19.0, down_ms=6.0, down_mbit_per_s=90.0)
    made = measured_cluster(parse_link("100mbit/20mbit,5ms"), 3, times, memory_bytes=5)
    assert made.path(0, 2).queues == (Queue("0 sends", 19.0), Queue("2 receives", 95.0))
    assert made.path(2, 0).queues == (Queue("2 sends", 90.0), Queue("0 receives", 90.0))
    assert isinstance(made, Cluster)
    assert made.machines[2] == Machine(name="server-2", kind="server-2", memory_bytes=5)


def test_curves() -> None:
    points = [(4.0, 1.0), (16.0, 3.0)]
    assert at(points, 4) == 1
    assert at(points, 10) == 2
    assert at(points, 2) == 0.5
    assert at(points, 28) == 5
    assert at([(8.0, 2.0)], 16) == 4
