"""Columns of the pipeline benchmark: speed, bytes, memory, times by part, and the lower bound of the step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from thinpipe.lab.bench.pipeline.bounds import Bound, Busy, bound_of_pipeline, bound_of_replicas, hops_of, ring_bytes
from thinpipe.lab.bench.pipeline.pipeline_options import PipelineBenchOptions, Variant
from thinpipe.lab.records.record import Row, column, columns_of, row_of
from thinpipe.lab.records.step_times import StepTimes, step_times
from thinpipe.pipeline.order import Action, Order, in_flight, make_order
from thinpipe.pipeline.report import LinkReport
from thinpipe.train.engines.latency_model import link_costs, makespan
from thinpipe.train.shaping import link_text

KIND = "bench pipeline"


@dataclass(frozen=True, kw_only=True)
class PipelineColumns:
    """A row; columns that do not apply to data-parallel training are None there."""

    link: str = column("link", key=True)
    workers: int = column("workers", key=True, format="d")
    parallel: str = column("parallel", key=True)
    layout: str | None = column("layout", key=True)
    schedule: str | None = column("schedule", key=True)
    chunks: int | None = column("chunks", key=True, format="d")
    codec: str | None = column("codec", key=True)
    stage: str | None = column("stage", key=True)  # torch, or None for thinpipe's
    threads: int = column("threads\neach", format="d")
    in_flight: int | None = column("chunks\nin flight", format="d")
    samples_per_s: float = column("samples\nper s", format=".1f", better="higher")
    of_data_parallel: float | None = column("of data-\nparallel", format=".2f", better="higher", default=None)
    of_uncompressed: float | None = column("of un-\ncompressed", format=".2f", better="higher", default=None)
    of_torch: float | None = column("of torch's\nstage", format=".2f", better="higher", default=None)
    step_p25_ms: float = column("step\np25 ms", format=".1f")
    step_ms: float = column("step\nms", format=".1f", better="lower")
    step_p75_ms: float = column("step\np75 ms", format=".1f")
    step_p95_ms: float = column("step\np95 ms", format=".1f", better="lower")
    busiest_compute_p25_ms: float = column("busiest\np25 ms", format=".1f")
    busiest_compute_p75_ms: float = column("busiest\np75 ms", format=".1f")
    bound: Bound
    order_ms: float | None = column("order\nms", format=".1f", default=None)
    of_bound: float = column("bound /\nstep", format=".2f", better="higher")
    tensor_bytes: int = column("tensor\nbytes", format="d")
    wire_bytes: int = column("wire\nbytes", format="d", better="lower")
    peak_mib: float | None = column("peak MiB\nper worker", format=".0f", better="lower")
    times: StepTimes = field(default_factory=StepTimes)
    bubble: float | None = column("bubble", format=".2f", better="lower", default=None)
    bubble_theory: float | None = column("bubble\nin theory", format=".2f", default=None)
    samples_ms: tuple[float, ...]
    cuts: tuple[int, ...]
    per_worker: Sequence[Mapping[str, Any]]


COLUMNS = columns_of(PipelineColumns)
PARTS = tuple(column.name for column in columns_of(StepTimes))


@dataclass(frozen=True, kw_only=True)
class WorkerMeasurements:
    """Measurements of one worker in one run; times are medians of the timed steps."""

    samples_ms: tuple[float, ...]  # timed steps, the same on all workers: a step ends when it ends on all
    compute_samples_ms: tuple[float, ...]  # of the same steps: forward, backward and update on this worker
    peak_bytes: int | None
    parameter_bytes: int
    threads: int
    module_ms: float  # forward and backward of a step
    update_ms: float
    stage_ms: dict[int, tuple[float, float]]  # of a pipeline: forward and backward of a chunk, by local stage
    links: tuple[LinkReport, ...]  # all links of the pipeline, sums over ``link_steps`` steps
    link_steps: int
    cuts: tuple[int, ...]
    order: Order | None = None  # of a pipeline: the schedule with its number of chunks in flight

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> WorkerMeasurements:
        stages = {int(stage): (forward, backward) for stage, (forward, backward) in data["stage_ms"].items()}
        links = tuple(LinkReport(**each) for each in data["links"])
        lists = {name: tuple(data[name]) for name in ("samples_ms", "compute_samples_ms", "cuts")}
        return WorkerMeasurements(**(data | lists | {"stage_ms": stages, "links": links}))


def make_row(options: PipelineBenchOptions, variant: Variant, workers: Sequence[WorkerMeasurements]) -> Row:
    """Return the row of a run from the measurements of its workers."""
    first, link, steps = workers[0], variant.link, workers[0].link_steps
    step_ms = float(np.median(first.samples_ms))
    details = [_worker_parts(number, measured, steps) for number, measured in enumerate(workers)]
    busy = [Busy(measured.module_ms, measured.update_ms) for measured in workers]
    busiest = max(workers, key=lambda measured: measured.module_ms + measured.update_ms)
    if variant.parallel == "data":
        bound = bound_of_replicas(link, first.parameter_bytes, busy)
        tensor_bytes = wire_bytes = ring_bytes(first.parameter_bytes, len(workers)) * len(workers)
    else:
        bound = bound_of_pipeline(link, hops_of(first.links, steps), busy)
        tensor_bytes = sum(each.tensor_bytes for each in first.links) // steps
        wire_bytes = sum(each.wire_bytes for each in first.links) // steps
    percentiles: dict[str, Any] = {
        **{f"step_p{p}_ms": float(np.percentile(first.samples_ms, p)) for p in (25, 75, 95)},
        **{f"busiest_compute_p{p}_ms": float(np.percentile(busiest.compute_samples_ms, p)) for p in (25, 75)},
    }
    columns = PipelineColumns(
        link=link_text(link),
        workers=len(workers),
        parallel=variant.parallel,
        layout=variant.layout,
        schedule=variant.schedule,
        chunks=variant.chunks,
        codec=variant.compress,
        stage=variant.stage,
        threads=first.threads,
        in_flight=_in_flight(variant, workers),
        samples_per_s=options.shapes.batch_size / step_ms * 1e3,
        step_ms=step_ms,
        **percentiles,
        bound=bound,
        of_bound=bound.bound_ms / step_ms,
        tensor_bytes=tensor_bytes,
        wire_bytes=wire_bytes,
        peak_mib=max((d["peak_mib"] for d in details if d["peak_mib"] is not None), default=None),
        samples_ms=first.samples_ms,
        cuts=first.cuts,
        per_worker=details,
    )
    if variant.parallel == "pipeline":
        times = StepTimes(**{name: _mean([detail[name] for detail in details]) for name in PARTS})
        order_ms, in_theory = _theory(variant, workers)
        bubble = _bubble(workers, step_ms)
        columns = replace(columns, times=times, order_ms=order_ms, bubble=bubble, bubble_theory=in_theory)
    return row_of(columns)


def compare(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their speedups over data-parallel training, no codec and torch's stage, on the same link."""

    def speed_of(row: Row, **wanted: Any) -> float | None:
        same = {name: row[name] for name in ("link", "workers")} | wanted
        found = (other["samples_per_s"] for other in rows if all(other[name] == value for name, value in same.items()))
        return next(found, None)

    compared: list[Row] = []
    for row in rows:
        pipeline = {name: row[name] for name in ("parallel", "layout", "schedule", "chunks")}
        data, plain = speed_of(row, parallel="data"), speed_of(row, **pipeline, codec="none", stage=None)
        torchs, speed = speed_of(row, **pipeline, stage="torch"), row["samples_per_s"]
        compared.append(
            {
                **row,
                "of_data_parallel": speed / data if data and row["parallel"] != "data" else None,
                "of_uncompressed": speed / plain if plain and row["codec"] not in (None, "none") else None,
                "of_torch": speed / torchs if torchs and row["stage"] is None else None,
            }
        )
    return compared


def _worker_parts(number: int, measured: WorkerMeasurements, steps: int) -> dict[str, Any]:
    """Return the times by part, the traffic and the memory of one worker."""
    sent = [link for link in measured.links if link.source_worker == number]
    received = [link for link in measured.links if link.target_worker == number]
    times = step_times(measured.module_ms + measured.update_ms, sent, received, steps)
    return {
        "worker": number,
        **row_of(times),
        "sent_bytes": sum(link.wire_bytes for link in sent) // steps,
        "received_bytes": sum(link.wire_bytes for link in received) // steps,
        "parameter_mib": measured.parameter_bytes / 2**20,
        "peak_mib": None if measured.peak_bytes is None else measured.peak_bytes / 2**20,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is unknown."""
    return None if None in values else float(np.mean(np.asarray(values, float)))


def _in_flight(variant: Variant, workers: Sequence[WorkerMeasurements]) -> int | None:
    """Return the maximum number of a pipeline's chunks in flight."""
    order, stages = workers[0].order, sum(len(measured.stage_ms) for measured in workers)
    return (
        None
        if order is None or variant.chunks is None
        else min(in_flight(order, stages, variant.chunks), variant.chunks)
    )


def _bubble(workers: Sequence[WorkerMeasurements], step_ms: float) -> float:
    """Return the fraction of all workers' time in which they do not compute."""
    return 1 - sum(measured.module_ms for measured in workers) / (len(workers) * step_ms)


def _theory(variant: Variant, workers: Sequence[WorkerMeasurements]) -> tuple[float, float]:
    """Return the time of the schedule on these workers and links, and its bubble on links that take no time.

    The time is in ms, with free codecs and without headers.
    """
    order, chunks, steps = workers[0].order, variant.chunks, workers[0].link_steps
    assert order is not None
    assert chunks is not None
    cost = {stage: times for measured in workers for stage, times in measured.stage_ms.items()}
    placement = [stage % len(workers) for stage in range(len(cost))]

    def cost_of(action: Action) -> float:
        return cost[action.stage]["FB".index(action.kind)]

    orders = make_order(order, placement, chunks)
    work = sum(cost_of(action) for actions in orders.values() for action in actions)
    sizes = {(each.source, each.target): each.wire_bytes // (steps * chunks) for each in workers[0].links}
    order_ms = makespan(orders, cost_of, link_costs(variant.link, placement, sizes))
    return order_ms, 1 - work / (len(workers) * makespan(orders, cost_of))
