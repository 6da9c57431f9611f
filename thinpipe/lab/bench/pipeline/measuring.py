"""Measurement of all rows of the pipeline benchmark in one launch, alternating between rows step by step.

    row       A        B        C        C        A        B        B ...
    step    -- **    -- **    -- **    -- **    -- **    -- **    -- **

Each turn (1) waits for all workers at a barrier, (2) takes a step that is not timed (``--``), so that caches, the
optimizer and TCP's congestion window are as in training, and (3) times the next step (``**``). So load from other
processes and changes of clock frequency affect all rows alike. The order of the rows is shuffled in each round.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from thinpipe.codecs.recipes import directions
from thinpipe.comm.membership import member
from thinpipe.lab.bench.barrier import barrier_group
from thinpipe.lab.bench.meter import elapsed_ms, peak_extra_bytes
from thinpipe.lab.bench.models import build_cuttable, build_named
from thinpipe.lab.bench.outcome import Outcome, Print
from thinpipe.lab.bench.pipeline.pipeline_columns import COLUMNS, KIND, WorkerMeasurements, compare, make_row
from thinpipe.lab.bench.pipeline.pipeline_options import PipelineBenchOptions, Variant
from thinpipe.lab.bench.pipeline.pipeline_tables import plot_speed, result_tables, row_line
from thinpipe.lab.bench.pipeline.worlds import Networks, make_worlds, networks_of, place
from thinpipe.lab.records.record import Record, Row
from thinpipe.launch.workers import run_workers
from thinpipe.links.counters import DeviceClock
from thinpipe.links.registry import link_codec
from thinpipe.links.slot import Slot
from thinpipe.pipeline.partition import StageModule, UnitCost, measure_units
from thinpipe.pipeline.report import LinkReport
from thinpipe.pipeline.schedule import torch_schedule
from thinpipe.pipeline.shaped_stage import TorchStage
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.finite import Checked
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.replica import ReplicaEngine
from thinpipe.train.engines.step import train_step
from thinpipe.train.engines.units import Units, cut_model, meta_of
from thinpipe.train.engines.world import World, join_world
from thinpipe.train.models.sequential import units_of
from thinpipe.train.shaping import list_facts
from thinpipe.train.tasks.task import Batch

_STEPS_PER_TURN = 2  # the last one is timed
_REPORT_S = 10.0  # interval between progress lines


def measure(options: PipelineBenchOptions, on_row: Print, on_progress: Print) -> Outcome | None:
    """Measure all rows; return the results in the first worker's process, None in others."""
    variants = options.variants()
    with networks_of(variants) as networks:
        # gloo even where each worker has a GPU: messages must cross the link, not the memory of the machine.
        arguments = (options, networks, on_row, on_progress)
        workers = max(variant.workers for variant in variants)
        rows = run_workers(measure_variants, *arguments, workers=workers, network=networks, backend="gloo")[0]
    if not rows:
        return None
    rows = compare(rows)
    config = {**asdict(options), "links": list_facts(options.links), "device": str(options.found_device)}
    record = Record(kind=KIND, config=config, columns=COLUMNS, rows=tuple(rows))
    plot = plot_speed(rows, options.name)
    return Outcome(title=f"Pipelines: {options.name}", record=record, tables=result_tables(rows), plot=plot)


def measure_variants(
    options: PipelineBenchOptions, networks: Networks | None, on_row: Print, on_progress: Print
) -> list[Row] | None:
    """Measure on this worker and return the rows on the first one, None on the others. A collective."""
    world, variants = join_world(options.found_device.type, threads=options.threads), options.variants()
    worlds, everyone = make_worlds(world, variants, networks), barrier_group()
    # A user's model may be too large for one worker: the engine estimates its costs by counting operations.
    is_measured = options.source is None and any(variant.parallel == "pipeline" for variant in variants)
    costs = _measure_costs(options, world) if is_measured else None
    progress = _Progress(on_progress if world.is_client else lambda line: None)
    count, rows = options.interleave or len(variants), []
    for start in range(0, len(variants), count):
        together = variants[start : start + count]
        gc.collect()  # stages and schedules are reference cycles: those of the previous rows would stay in memory
        trainers: list[_Trainer | None] = []
        for number, variant in enumerate(together, start + 1):
            everyone.barrier()  # workers without a part in this row wait here, however long it takes
            mine = world.worker < variant.workers
            trainers.append(_Trainer(variant, options, worlds[place(variant)], costs) if mine else None)
            progress.note(f"{number} of {len(variants)} rows have taken their first steps")
        for step in range(options.steps):
            for index in random.Random(step).sample(range(len(together)), len(together)):
                everyone.barrier()
                if (trainer := trainers[index]) is not None:
                    trainer.turn()
            progress.note(f"timed step {step + 1} of {options.steps} of rows {start + 1} to {start + len(together)}")
        for variant, trainer in zip(together, trainers, strict=True):
            gathered = everyone.gather(None if trainer is None else trainer.measured().to_json())
            if world.is_client:
                workers = [WorkerMeasurements.from_json(each) for each in gathered[: variant.workers]]
                rows.append(make_row(options, variant, workers))
                on_row(row_line(rows[-1]))
    return rows if world.is_client else None


class _Progress:
    """Reports progress, at most once in _REPORT_S."""

    def __init__(self, report: Print) -> None:
        self._report, self._reported_at = report, time.monotonic()

    def note(self, line: str) -> None:
        if time.monotonic() - self._reported_at >= _REPORT_S:
            self._report(line)
            self._reported_at = time.monotonic()


def _measure_costs(options: PipelineBenchOptions, world: World) -> list[UnitCost]:
    """Measure the costs of the model's units on the first worker and return them on all: all rows use the same cuts."""
    model, batch = build_cuttable(options.model, options.shapes)
    chunk = [part.chunk(max(options.chunks))[0] for part in batch.inputs]
    costs = measure_units(units_of(model), *chunk) if world.is_client else []
    return [UnitCost(**cost) for cost in world.gather([asdict(cost) for cost in costs])[0]]


class _Trainer:
    """One row on this worker: its model after the first steps, and the measurements of its turns."""

    def __init__(
        self, variant: Variant, options: PipelineBenchOptions, world: World, costs: Sequence[UnitCost] | None
    ) -> None:
        self._variant, self._threads, self._world = variant, _threads(variant, options), world
        torch.set_num_threads(self._threads)
        _warm_codecs(variant, world.device)
        model, batch = _build(variant, options, world)
        self._step_number = 0

        def first_steps() -> None:
            self._engine = _make_engine(variant, options, world, costs, model, batch)
            replica, replicas = self._engine.shares
            mine = [part.chunk(replicas)[replica].to(world.device) for part in (*batch.inputs, batch.labels)]
            self._batch = Batch(inputs=tuple(mine[:-1]), labels=mine[-1])
            self._optimizer = torch.optim.SGD(self._engine.parameters(), lr=1e-3)
            self._engine.warm_up()
            steady_after = max((each.steady_after for each in self._engine.link_plans()), default=0)
            for left in reversed(range(max(options.warmup, steady_after))):
                self._step(another=left > 0)

        self._peak_bytes = peak_extra_bytes(first_steps, device=world.device)
        parameters = list(self._engine.parameters())
        self._parameter_bytes = sum(each.numel() * each.element_size() for each in parameters)
        is_built = not isinstance(model, Units) or model.load is None
        if self._peak_bytes is not None and world.device.type == "cpu" and is_built:
            self._peak_bytes += self._parameter_bytes  # allocated before the measurement
        self._engine.collect_links()  # discard the counters of the first steps
        self._samples_ms: list[float] = []
        self._module_ms: list[float] = []
        self._update_ms: list[float] = []
        self._stage_ms: dict[int, list[tuple[float, float]]] = {}

    def turn(self) -> None:
        """Take a step that is not timed, and time the next one: from the end of the previous step, as in training."""
        engine = self._engine
        torch.set_num_threads(self._threads)
        for _ in range(_STEPS_PER_TURN - 1):
            self._step(another=True)
        updates_ms, stages_ms = engine.updates.total_ms(), self._compute_ms()
        began = time.perf_counter()
        self._step(another=False)
        self._samples_ms.append((time.perf_counter() - began) * 1e3)
        self._update_ms.append(engine.updates.total_ms() - updates_ms)
        taken = [(stage, _difference(after, stages_ms[stage])) for stage, after in self._compute_ms().items()]
        for stage, each in taken:
            self._stage_ms.setdefault(stage, []).append(each)
        self._module_ms.append(sum(sum(each) for _, each in taken) if taken else self._alone_ms())

    def measured(self) -> WorkerMeasurements:
        """Return the measurements of all turns. A collective of the workers of this row."""
        chunks, engine = self._variant.chunks or 1, self._engine
        stage_ms = {stage: np.median(each, axis=0) / chunks for stage, each in self._stage_ms.items()}
        return WorkerMeasurements(
            samples_ms=tuple(self._samples_ms),
            compute_samples_ms=tuple(map(sum, zip(self._module_ms, self._update_ms, strict=True))),
            peak_bytes=self._peak_bytes,
            parameter_bytes=self._parameter_bytes,
            threads=self._threads,
            module_ms=float(np.median(self._module_ms)),
            update_ms=float(np.median(self._update_ms)),
            stage_ms={stage: (float(forward), float(backward)) for stage, (forward, backward) in stage_ms.items()},
            links=tuple(engine.collect_links()[0]),
            link_steps=_STEPS_PER_TURN * len(self._samples_ms),
            cuts=engine.cuts if isinstance(engine, PipelineEngine) else (),
            order=engine.order,
        )

    def _step(self, *, another: bool) -> None:
        self._step_number += 1
        train_step(self._engine, self._optimizer, self._batch, step=self._step_number, another=another)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def _compute_ms(self) -> dict[int, tuple[float, float]]:
        stages = self._engine.training_stages if isinstance(self._engine, PipelineEngine) else ()
        times = {stage.stage_index: stage.compute_ms() for stage in stages}
        return {index: (ms["forward"], ms["backward"]) for index, ms in times.items()}

    def _alone_ms(self) -> float:
        """Return the time of forward and backward of a replica, without the exchange of gradients."""
        engine = self._engine
        assert isinstance(engine, ReplicaEngine)
        return elapsed_ms(lambda: engine.compute_alone(self._batch), device=self._world.device)


def _difference(after: tuple[float, float], before: tuple[float, float]) -> tuple[float, float]:
    return after[0] - before[0], after[1] - before[1]


def _threads(variant: Variant, options: PipelineBenchOptions) -> int:
    """Return the threads of each worker of a row: as configured, or its share of the cores of this machine."""
    me = member()
    assert me is not None
    if options.threads is not None or "OMP_NUM_THREADS" in os.environ or me.local_size < me.size:
        return torch.get_num_threads()  # as set by ``join_world`` and ``joined``
    return max(1, (os.cpu_count() or 1) // variant.workers)


def _build(variant: Variant, options: PipelineBenchOptions, world: World) -> tuple[torch.nn.Module | Units, Batch]:
    """Return the model, without weights if it is a user's own, and the batch of all workers."""
    if options.source is None:
        return build_cuttable(options.model, options.shapes)
    model, batch, fill = build_named(options.source, options.shapes)
    parts = variant.chunks or (world.workers if variant.parallel == "data" else 1)
    return cut_model(model, meta_of([part.chunk(parts)[0] for part in batch.inputs]), fill), batch


def _make_engine(
    variant: Variant,
    options: PipelineBenchOptions,
    world: World,
    costs: Sequence[UnitCost] | None,
    model: torch.nn.Module | Units,
    batch: Batch,
) -> Engine:
    """Return this worker's part of a run, on its device."""
    if variant.parallel != "pipeline":
        return ReplicaEngine(model, world)
    assert variant.layout is not None
    assert variant.schedule is not None
    assert variant.chunks is not None
    assert variant.compress is not None
    cutting = Cutting(
        layout=variant.layout,
        order=variant.schedule,
        chunks=variant.chunks,
        client_layers=options.client_layers if variant.layout == "client-server" else None,
        costs=costs,
    )
    forward, backward = directions(variant.compress)
    links = Links(forward=link_codec(forward).immediate_spec, backward=backward, shaping=variant.link)
    chunk = meta_of([part.chunk(variant.chunks)[0] for part in batch.inputs])
    kind = PipelineEngine if variant.stage is None else TorchStageEngine
    return kind(model, chunk, cutting, links, world)


def _warm_codecs(variant: Variant, device: torch.device) -> None:
    """Compile the kernels of codecs, so that the memory of compilation is not counted as that of a step."""
    for spec in () if variant.compress is None else set(directions(variant.compress)):
        link_codec(spec).warm_up(Slot(torch.Size((64, 1024)), torch.float32), variant.chunks or 1, device)


class _Timed(TorchStage):
    """torch's stage with the timers and attributes of ours, and without links: torch sends tensors uncompressed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clocks = {kind: DeviceClock(self.device) for kind in ("forward", "backward")}
        self.links: list[Any] = []

    def compute_ms(self) -> dict[str, float]:
        return {kind: clock.total_ms() for kind, clock in self.clocks.items()}

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clocks["forward"].measure():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.clocks["backward"].measure():
            super().backward_one_chunk(*args, **kwargs)


class _TorchStage(Checked, _Timed):
    """torch's stage with our check for values that are not finite."""


class TorchStageEngine(PipelineEngine):
    """An engine with torch's own stages as the baseline: the same model and step, torch's schedule for a line.

    Uncompressed. Transfer times are not measured, but the bytes follow from the shapes.
    """

    _steps = 0  # number of steps since ``collect_links``

    def _stage(self, module: StageModule, index: int, *, training: bool) -> Any:
        return _TorchStage(*self._stage_arguments(module, index, training=training), group=self.world.group)

    def _schedule(self, stages: list[Any], loss: Any) -> Any:
        chunks = self._cutting.chunks
        torchs = torch_schedule(self._cutting.order, len(self.partition.modules), chunks)
        if self._cutting.layout == "client-server" or torchs is None:
            return super()._schedule(stages, loss)
        return torchs(stages[0], chunks, loss, scale_grads=False)

    def compute(self, *batches: Batch | None) -> tuple[float, float]:
        self._steps += len(batches)
        return super().compute(*batches)

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
