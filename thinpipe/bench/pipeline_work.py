"""What the workers of the pipeline benchmark do: time steps of several kinds of stages in turn, or weigh one step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from thinpipe.measure.meter import Times, peak_extra_bytes
from thinpipe.pipeline import ClientServerSchedule, LinearSchedule, PipelineStage
from thinpipe.pipeline.partition import Layout, stage_count, stages_of

TORCH = "torch"  # in place of a codec spec: torch's own PipelineStage


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of equal layers, and batches for it; one chunk between two stages is rows x width floats."""

    width: int = 512
    rows: int = 512  # of a chunk
    layers: int = 4  # of a stage
    chunks: int = 8
    rounds: int = 10

    def module(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.layers)))

    def batch(self) -> torch.Tensor:
        return torch.randn(self.rows * self.chunks, self.width)

    @property
    def message_bytes(self) -> int:
        return self.rows * self.width * 4


def time_steps(workload: Workload, schedule: str, specs: list[str]) -> dict[str, list[float]]:
    """Step times in ms, on this worker, of one pipeline per spec, a step of each in turn: all see the same machine."""
    torch.set_num_threads(1)
    steps = {spec: _torch_schedule(workload, schedule, spec) for spec in specs}
    times: dict[str, list[float]] = {spec: [] for spec in specs}
    for round_number in range(workload.rounds + 1):
        for spec in specs if round_number % 2 else reversed(specs):
            dist.barrier()
            began = time.perf_counter()
            steps[spec]()
            dist.barrier()  # a step is over when it is for all
            if round_number:  # the first warms up
                times[spec].append((time.perf_counter() - began) * 1e3)
    return times


def weigh_step(workload: Workload, layout: Layout, order: Any) -> int | None:
    """Peak bytes of a step beyond what this worker holds between steps, after two steps to warm up."""
    torch.set_num_threads(1)
    worker, workers = dist.get_rank(), dist.get_world_size()
    count = stage_count(workers, layout)
    stages = [
        PipelineStage(workload.module(), index, count, "cpu", forward="none", backward="none")
        for index in stages_of(worker, workers, layout)
    ]
    if layout == "linear":
        schedule: Any = LinearSchedule(stages[0], workload.chunks, nn.functional.mse_loss, order=order)
    else:
        schedule = ClientServerSchedule(stages, workload.chunks, nn.functional.mse_loss, order=order)
    step = _stepper(workload, schedule, stages)
    step()
    step()
    return peak_extra_bytes(step)


def median_ms(samples: list[float]) -> float:
    return Times(tuple(samples)).median_ms


def _torch_schedule(workload: Workload, name: str, spec: str) -> Callable[[], None]:
    worker, workers = dist.get_rank(), dist.get_world_size()
    single = name in ("ScheduleGPipe", "Schedule1F1B")
    count = workers if single else 2 * workers
    stages: list[Any] = []
    for index in range(worker, count, workers):
        if spec == TORCH:
            stages.append(pipelining.PipelineStage(workload.module(), index, count, torch.device("cpu")))
        else:
            stages.append(PipelineStage(workload.module(), index, count, "cpu", forward=spec, backward=spec))
    schedule = getattr(schedules, name)(stages[0] if single else stages, workload.chunks, nn.functional.mse_loss)
    return _stepper(workload, schedule, stages)


def _stepper(workload: Workload, schedule: Any, stages: list[Any]) -> Callable[[], None]:
    """One training step without the optimizer, on data that stays where it is needed."""
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    inputs = [workload.batch()] if first else []
    target = workload.batch() if last else None

    def step() -> None:
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(*inputs, target=target, return_outputs=False)

    return step
