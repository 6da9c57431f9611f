"""One training step of each way to train, on this worker: single process, data-parallel, a stage of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinpipe.bench.models import CuttableWorkload, build_cuttable
from thinpipe.bench.pipeline.settings import Run, Settings
from thinpipe.measure.meter import time_calls
from thinpipe.pipeline import ClientServerSchedule, LinearSchedule, PipelineStage
from thinpipe.pipeline.balance import UnitCost, measure_units
from thinpipe.pipeline.links.counters import DeviceClock
from thinpipe.pipeline.partition import StageModule, choose_cuts, cut_units, stage_count, stages_of
from thinpipe.pipeline.units import units_of
from thinpipe.workers.backend import CPU
from thinpipe.workers.exchange import gather

_COMPUTE_CALLS = 3  # of a replica's computation alone, to see how long it takes without its neighbours


@dataclass
class Trainer:
    """What this worker does in a step, and the modules it trains."""

    modules: list[nn.Module]
    compute: Callable[[], None]  # forward and backward, with everything that travels
    device: torch.device
    stages: list[PipelineStage] = field(default_factory=list)  # of a pipeline
    cuts: tuple[int, ...] = ()
    compute_alone: Callable[[], None] | None = None  # without what travels; None where stages time themselves

    def __post_init__(self) -> None:
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=1e-3)
        self.updates = DeviceClock(self.device)

    def step(self) -> None:
        self.compute()
        with self.updates.measure():
            self._optimizer.step()
            self._optimizer.zero_grad()

    def module_ms(self, steps: int) -> float:
        """Forward and backward of a step, without what travels: from the stages, or by running it alone."""
        if self.compute_alone is None:
            return sum(sum(stage.compute_ms().values()) for stage in self.stages) / steps
        return time_calls(self.compute_alone, repeat=_COMPUTE_CALLS, budget_s=30, device=self.device).median_ms

    @property
    def parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for module in self.modules for p in module.parameters())


def measure_costs(settings: Settings) -> list[UnitCost]:
    """What the units of the model cost on the first worker, for all: cuts of one launch are made by the same costs."""
    workload = build_cuttable(settings.model, settings.shapes)
    chunk = [part.chunk(max(settings.chunks))[0] for part in workload.inputs]
    costs = measure_units(units_of(workload.model), *chunk) if dist.get_rank() == 0 else []
    return [UnitCost(**cost) for cost in gather([asdict(cost) for cost in costs], None, CPU)[0]]


def make_trainer(
    run: Run, settings: Settings, device: torch.device, costs: Sequence[UnitCost]
) -> Callable[[], Trainer]:
    """Builds the model in host memory; what is returned moves this worker's part to its device and sets it up."""
    workload = build_cuttable(settings.model, settings.shapes)
    units = units_of(workload.model)
    if run.parallel == "pipeline":
        return _pipeline(run, settings, device, workload, units, costs)
    model = cut_units(units, ())[0]
    rank, size = (dist.get_rank(), dist.get_world_size()) if run.parallel == "data" else (0, 1)
    inputs = [part.chunk(size)[rank] for part in workload.inputs]
    return lambda: _whole(model, inputs, workload.target.chunk(size)[rank], workload.loss, device, run)


def _whole(
    model: nn.Module,
    inputs: Sequence[Tensor],
    target: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
    run: Run,
) -> Trainer:
    """The whole model on this worker, with all of the batch or a replica's share of it."""
    model = model.to(device)
    inputs, target = [part.to(device) for part in inputs], target.to(device)
    parallel = DistributedDataParallel(model) if run.parallel == "data" else model

    def compute() -> None:
        loss(parallel(*inputs), target).backward()

    def compute_alone() -> None:
        loss(model(*inputs), target).backward()
        model.zero_grad()

    return Trainer([model], compute, device, compute_alone=compute_alone)


def _pipeline(
    run: Run,
    settings: Settings,
    device: torch.device,
    workload: CuttableWorkload,
    units: list[nn.Module],
    costs: Sequence[UnitCost],
) -> Callable[[], Trainer]:
    assert run.layout is not None
    assert run.chunks is not None
    worker, workers = dist.get_rank(), dist.get_world_size()
    chunk = tuple(part.chunk(run.chunks)[0] for part in workload.inputs)
    client_layers = settings.client_layers if run.layout == "client-server" else None
    cuts = choose_cuts(len(units), workers, run.layout, client_layers=client_layers, costs=costs)
    parts = cut_units(units, cuts)
    examples = _boundaries(parts, chunk)
    mine = {index: parts[index] for index in stages_of(worker, workers, run.layout)}
    inputs, target = workload.inputs, workload.target

    def set_up() -> Trainer:
        stages = [
            PipelineStage(
                module.to(device),
                index,
                stage_count(workers, run.layout or "linear"),
                device,
                forward=run.compress or "none",
                backward=run.compress or "none",
                input_args=examples[index],
                output_args=examples[index + 1],
            )
            for index, module in mine.items()
        ]
        schedule: Any = (
            LinearSchedule(stages[0], run.chunks, workload.loss, order=run.schedule)
            if run.layout == "linear"
            else ClientServerSchedule(stages, run.chunks, workload.loss, order=run.schedule)
        )
        given = [part.to(device) for part in inputs] if stages[0].is_first else []
        labels = target.to(device) if stages[-1].is_last else None
        return Trainer(
            list(mine.values()),
            lambda: schedule.step(*given, target=labels, return_outputs=False),
            device,
            stages=stages,
            cuts=cuts,
        )

    return set_up


def _boundaries(parts: Sequence[StageModule], chunk: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """What goes into every stage, and comes out of the last, for one chunk: tensors without content.

    Stages on a GPU that talk through gloo must be told; the others need not find out by sending pickles.
    """
    values = tuple(part.to("meta") for part in chunk)
    boundaries = [values]
    for part in parts:
        output = copy.deepcopy(part).to("meta")(*values)
        values = tuple(
            value.detach().requires_grad_(value.is_floating_point())
            for value in (output if isinstance(output, tuple) else (output,))
        )
        boundaries.append(values)
    return boundaries
