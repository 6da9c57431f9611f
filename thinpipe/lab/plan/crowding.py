"""Crowding: what workers on one machine cost each other, with the model that is planned, and without links.

    measured                                  gives
    steps of one process, 1, 2, ... at once   how much workers that compute at the same time slow each other
    a pipeline of 2, 3, ... workers           what an action takes longer than in one process: threads that receive,
                                              and workers that wait for a core

Machines of their own do not have these costs: they are those of a plan that is measured on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from thinpipe.lab.plan.calibration import Runs
from thinpipe.lab.plan.cuts import linear_cuts, stage_times
from thinpipe.lab.plan.model import PlannedModel, alone
from thinpipe.lab.plan.network import LinkTimes, measured_cluster
from thinpipe.lab.plan.predictor import Candidate, Predictor
from thinpipe.lab.plan.profile import ModelProfile
from thinpipe.train.engines.partitioned_model import Cutting, Links
from thinpipe.train.engines.pipeline import PipelineEngine
from thinpipe.train.engines.step import train_step
from thinpipe.train.engines.world import World

_WARM_UP, _STEPS, _REPLICA_STEPS = 3, 12, 20  # replicas neither begin nor end together
_LOOPBACK = LinkTimes(up_ms=0.1, up_mbit_per_s=1e5, down_ms=0.1, down_mbit_per_s=1e5)

# Run ``crowded_ms`` with these cuts and samples of a microbatch on a number of workers.
Run = Callable[[int, Sequence[int], int], float]


def crowd(profile: ModelProfile, run: Run, workers: int, batch_size: int, samples: int) -> ModelProfile:
    """Return the profile with the costs of up to ``workers`` workers on this machine; ``samples`` of a microbatch."""
    replicas = [run(count, (), max(batch_size // 8, 1)) for count in range(1, workers + 1)]
    profile = replace(profile, slowdown=[each / replicas[0] for each in replicas])
    extra, chunks = [0.0], batch_size // samples
    for count in range(2, min(workers, len(profile.units)) + 1):  # a stage has a unit or more
        cluster = measured_cluster(None, count, _LOOPBACK, slowdown=profile.slowdown)
        predictor = Predictor(profile, cluster, batch_size)
        cuts = _even_cuts(predictor, count, samples)
        made = Candidate(
            parallel="pipeline",
            machines=tuple(range(count)),
            layout="linear",
            cuts=cuts,
            schedule="gpipe",
            chunks=chunks,
        )
        missing = run(count, cuts, samples) - predictor.predict(made).step_ms
        extra.append(max(missing / (2 * chunks), 0.0))  # every worker runs two actions a microbatch
    return replace(profile, crowded_action_ms=extra)


def _even_cuts(predictor: Predictor, workers: int, samples: int) -> tuple[int, ...]:
    units = range(len(predictor.profile.units))
    times = [sum(predictor.unit_ms(unit, samples, 0, kind) for kind in "FB") for unit in units]
    stage = stage_times(times, [0.0] * len(times), np.inf)
    free = np.zeros(len(times) + 1)
    cuts = linear_cuts([stage] * workers, [free] * (workers - 1))
    assert cuts is not None
    return cuts


def crowded_ms(
    profile: ModelProfile,
    model: PlannedModel,
    world: World,
    cuts: Sequence[int],
    *,
    batch_size: int,
    samples: int,
    amp: bool = False,
) -> float:
    """Return the time of a step of a pipeline with these cuts, or, without, of a process on each worker. A collective.

    ``samples``: of a microbatch of the pipeline, of a batch of each process.
    """
    if not cuts:
        runs = Runs(profile, model, alone(), torch.optim.SGD, amp)
        took = runs.replica_ms(samples, steps=_REPLICA_STEPS, begin=world.control.barrier)
        return float(np.mean(world.control.gather(took)))
    units, inputs = model.cut(samples, amp=amp)
    cutting = Cutting(layout="linear", order="gpipe", chunks=batch_size // samples, cuts=tuple(cuts))
    engine = PipelineEngine(units, inputs, cutting, Links(forward="none", backward="none"), world, amp=amp)
    made, batch = torch.optim.SGD(list(engine.parameters()), lr=1e-6), model.rows(batch_size // samples * samples)
    taken = []
    for step in range(_WARM_UP + _STEPS):
        began = time.perf_counter()
        train_step(engine, made, batch, step=step + 1, another=step + 1 < _WARM_UP + _STEPS)
        taken.append((time.perf_counter() - began) * 1e3)
    return max(world.control.gather(float(np.median(taken[_WARM_UP:]))))
