"""Runs every way to train on the workers of one launch and times its steps: those that ``thinpipe train`` makes."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed import pipelining

from thinpipe.bench.models import build_cuttable, build_named
from thinpipe.bench.pipeline.rows import Measured, make_row
from thinpipe.bench.pipeline.settings import Run, Settings
from thinpipe.codecs.recipes import directions
from thinpipe.engines.engine import Engine
from thinpipe.engines.finite import Checked
from thinpipe.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.engines.replica import ReplicaEngine
from thinpipe.engines.step import train_step
from thinpipe.engines.units import Units, cut_model, meta_of
from thinpipe.engines.world import World, join_world
from thinpipe.measure.meter import peak_extra_bytes, time_calls
from thinpipe.measure.record import Row
from thinpipe.pipeline.links.counters import DeviceClock
from thinpipe.pipeline.links.slot import Slot
from thinpipe.pipeline.links.spec import at_once, encoding
from thinpipe.pipeline.partition import StageModule, UnitCost, measure_units
from thinpipe.pipeline.report import LinkReport
from thinpipe.pipeline.units import units_of
from thinpipe.workers.launch import run_workers
from thinpipe.workers.network import thin_network
from thinpipe.workers.shape import Shaping
from thinpipe.workloads.task import Batch

_ALONE_CALLS = 3  # of a replica's computation alone, to see how long it takes without its neighbours


def measure_all(settings: Settings, on_row: Callable[[Row], None]) -> Iterator[Row]:
    """The rows of all launches. ``on_row`` hears of each as it is known, in the process of the first worker."""
    for workers, link, runs in settings.launches():
        with thin_network(link, workers) as network:
            # gloo even where every worker has a GPU: bytes are to pass the link, not the memory of the machine.
            arguments = (settings, link, runs, on_row)
            yield from run_workers(measure_runs, *arguments, workers=workers, network=network, backend="gloo")[0] or ()


def measure_runs(
    settings: Settings, link: Shaping | None, runs: list[Run], on_row: Callable[[Row], None]
) -> list[Row] | None:
    """On every worker of a launch; the rows on the first, None elsewhere."""
    world = join_world(settings.found_device.type, threads=settings.threads)
    # A user's model may be too large for one worker: its operations are counted, by the engine.
    is_measured = settings.source is None and any(run.parallel == "pipeline" for run in runs)
    costs = _measure_costs(settings, world) if is_measured else None
    rows = []
    for run in runs:
        everyone = world.gather(_measure(run, settings, world, costs, link).to_json())
        if world.is_client:
            rows.append(make_row(settings, run, link, [Measured.from_json(told) for told in everyone]))
            on_row(rows[-1])
    return rows if world.is_client else None


def _measure_costs(settings: Settings, world: World) -> list[UnitCost]:
    """What the units of the model cost on the first worker, for all: cuts of one launch are made by the same costs."""
    model, batch = build_cuttable(settings.model, settings.shapes)
    chunk = [part.chunk(max(settings.chunks))[0] for part in batch.inputs]
    costs = measure_units(units_of(model), *chunk) if world.is_client else []
    return [UnitCost(**cost) for cost in world.gather([asdict(cost) for cost in costs])[0]]


class _Trainer:
    """Steps of one run on this worker, all with one batch that stays where it is needed."""

    def __init__(self, engine: Engine, batch: Batch) -> None:
        self.engine, self._step = engine, 0
        replica, replicas = engine.shares
        mine = [part.chunk(replicas)[replica].to(engine.world.device) for part in (*batch.inputs, batch.labels)]
        self.batch = Batch(inputs=tuple(mine[:-1]), labels=mine[-1])
        self._optimizer = torch.optim.SGD(engine.parameters(), lr=1e-3)

    def step(self, *, another: bool = True) -> None:
        self._step += 1
        train_step(self.engine, self._optimizer, self.batch, step=self._step, another=another)
        if self.engine.world.device.type == "cuda":
            torch.cuda.synchronize(self.engine.world.device)

    def timed_steps_ms(self, steps: int) -> tuple[float, ...]:
        """Of steps that follow each other as in training: each from the end of the one before."""
        ended = [time.perf_counter()]
        for left in reversed(range(steps)):
            self.step(another=left > 0)
            ended.append(time.perf_counter())
        return tuple((end - start) * 1e3 for start, end in itertools.pairwise(ended))


def _measure(
    run: Run, settings: Settings, world: World, costs: Sequence[UnitCost] | None, link: Shaping | None
) -> Measured:
    gc.collect()  # stages and their schedule hold each other: the last run's would stay in memory
    _warm_codecs(run, world.device)
    model, batch = _build(run, settings, world)
    trainers: list[_Trainer] = []

    def first_steps() -> None:
        trainers.append(_Trainer(_make_engine(run, settings, world, costs, link, model, batch), batch))
        trainers[0].engine.warm_up()
        settled_after = max((each.settled_after for each in trainers[0].engine.link_plans()), default=0)
        for _ in range(max(settings.warmup, settled_after)):
            trainers[0].step()

    peak_bytes = peak_extra_bytes(first_steps, device=world.device)
    trainer, engine = trainers[0], trainers[0].engine
    parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in engine.parameters())
    is_built = not isinstance(model, Units) or model.fill is None
    if peak_bytes is not None and world.device.type == "cpu" and is_built:
        peak_bytes += parameter_bytes  # which were there before, and on a GPU were not
    engine.collect_links()  # what the first steps cost is left out
    samples_ms = trainer.timed_steps_ms(settings.steps)
    update_ms = engine.updates.total_ms() / settings.steps
    stages = engine.compute_ms() if isinstance(engine, PipelineEngine) else {}
    chunks = settings.steps * (run.chunks or 1)
    return Measured(
        samples_ms=samples_ms,
        peak_bytes=peak_bytes,
        parameter_bytes=parameter_bytes,
        threads=torch.get_num_threads(),
        module_ms=_alone_ms(engine, trainer.batch) if not stages else sum(map(sum, stages.values())) / settings.steps,
        update_ms=update_ms,
        stage_ms={stage: (forward / chunks, backward / chunks) for stage, (forward, backward) in stages.items()},
        links=tuple(engine.collect_links()[0]),
        cuts=engine.cuts if isinstance(engine, PipelineEngine) else (),
        order=engine.order,
    )


def _build(run: Run, settings: Settings, world: World) -> tuple[torch.nn.Module | Units, Batch]:
    """The model, a user's without its weights, and the batch of all workers."""
    if settings.source is None:
        return build_cuttable(settings.model, settings.shapes)
    model, batch, fill = build_named(settings.source, settings.shapes)
    parts = run.chunks or (world.workers if run.parallel == "data" else 1)
    return cut_model(model, meta_of([part.chunk(parts)[0] for part in batch.inputs]), fill), batch


def _make_engine(
    run: Run,
    settings: Settings,
    world: World,
    costs: Sequence[UnitCost] | None,
    link: Shaping | None,
    model: torch.nn.Module | Units,
    batch: Batch,
) -> Engine:
    """This worker's part, moved to its device."""
    if run.parallel != "pipeline":
        return ReplicaEngine(model, world)
    assert run.layout is not None
    assert run.schedule is not None
    assert run.chunks is not None
    assert run.compress is not None
    cutting = Cutting(
        layout=run.layout,
        order=run.schedule,
        chunks=run.chunks,
        client_layers=settings.client_layers if run.layout == "client-server" else None,
        costs=costs,
    )
    forward, backward = directions(run.compress)
    links = Links(forward=at_once(forward), backward=backward, shaping=link)
    chunk = meta_of([part.chunk(run.chunks)[0] for part in batch.inputs])
    kind = PipelineEngine if run.stage is None else TorchStageEngine
    return kind(model, chunk, cutting, links, world)


def _alone_ms(engine: Engine, batch: Batch) -> float:
    """Forward and backward of a replica, without what travels."""
    assert isinstance(engine, ReplicaEngine)
    alone = time_calls(
        lambda: engine.compute_alone(batch), repeat=_ALONE_CALLS, budget_s=30, device=engine.world.device
    )
    return alone.median_ms


def _warm_codecs(run: Run, device: torch.device) -> None:
    """Compile what codecs compile: that takes memory once, which is not a step's."""
    for spec in () if run.compress is None else set(directions(run.compress)):
        encoding(spec).warm_up(Slot(torch.Size((64, 1024)), torch.float32), run.chunks or 1, device)


class _Timed(pipelining.PipelineStage):
    """What our stage counts of itself, and no links: torch sends tensors as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clocks = {kind: DeviceClock(self.device) for kind in ("forward", "backward")}
        self.links: list[Any] = []
        self.needs_samples = False

    def compute_ms(self) -> dict[str, float]:
        return {kind: clock.total_ms() for kind, clock in self.clocks.items()}

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clocks["forward"].measure():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.clocks["backward"].measure():
            super().backward_one_chunk(*args, **kwargs)


class _TorchStage(Checked, _Timed):
    """Stops for numbers that are not finite, as ours does."""


class TorchStageEngine(PipelineEngine):
    """torch's own stages, to hold ours against: the same model, order and step, another way to send.

    Uncompressed. They do not say how long messages took, but their bytes are known beforehand.
    """

    _steps = 0  # since ``collect_links``

    def _stage(self, module: StageModule, index: int, *, training: bool) -> Any:
        return _TorchStage(*self._stage_arguments(module, index, training=training), group=self.world.group)

    def compute(self, *batches: Batch | None) -> tuple[float, float]:
        self._steps += len(batches)
        return super().compute(*batches)

    def expect_step(self) -> None:
        """torch's stage posts a receive when it waits for it."""

    def call_off(self) -> None:
        """There is nothing to call off."""

    def collect_links(self) -> tuple[list[LinkReport], float]:
        super().collect_links()
        steps, self._steps = self._steps, 0
        unknown = float("nan")
        reports = [
            LinkReport(
                source=plan.source,
                target=plan.target,
                source_worker=plan.source_worker,
                target_worker=plan.target_worker,
                direction=plan.direction,
                messages=steps * self._cutting.chunks * len(plan.shapes),
                tensor_bytes=steps * plan.tensor_bytes,
                wire_bytes=steps * plan.tensor_bytes,
                encode_ms=0.0,
                decode_ms=0.0,
                blocked_ms=unknown,
                wait_ms=unknown,
                transfer_ms=unknown,
                link_mb_per_s=None,
            )
            for plan in self.link_plans()
        ]
        return reports, 0.0
