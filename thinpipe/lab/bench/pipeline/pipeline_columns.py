"""Rows of the pipeline benchmark: speed, bytes, memory, times by part, and the lower bound of the step time.

The bound is the least time that a step can take: the time of its busiest worker or link, plus the delays before and
after. With a client and a server, one way 20 ms, a chunk passes four hops, one after the other::

    client  F |--20-->          >--20--|  F B  |--20-->          >--20--|  B   client
    server             | F |                            | B |

The server is idle in the first and in the last 20 ms of a step, so its bound is its compute time plus 40 ms. The link
to it is busy from the beginning, but the result of its last message must return: also 40 ms more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from thinpipe.comm.shaping import Queue, Shape, Shaping, link_text
from thinpipe.lab.bench.pipeline.pipeline_options import PipelineBenchOptions, Variant
from thinpipe.lab.records.record import Row, columns_of, figure, row_of
from thinpipe.lab.records.step_times import StepTimes, step_times
from thinpipe.pipeline.latency_model import link_costs, makespan
from thinpipe.pipeline.order import Action, Order, in_flight, make_order
from thinpipe.pipeline.report import LinkReport

KIND = "bench pipeline"


@dataclass(frozen=True, kw_only=True)
class PipelineColumns:
    """A row; columns that do not apply to data-parallel training are None there."""

    link: str = figure("link", key=True)
    workers: int = figure("workers", key=True, format="d")
    parallel: str = figure("parallel", key=True)
    layout: str | None = figure("layout", key=True)
    schedule: str | None = figure("schedule", key=True)
    chunks: int | None = figure("chunks", key=True, format="d")
    codec: str | None = figure("codec", key=True)
    stage: str | None = figure("stage", key=True)  # torch, or None for thinpipe's
    threads: int = figure("threads\neach", format="d")
    in_flight: int | None = figure("chunks on\ntheir way", format="d")
    samples_per_s: float = figure("samples\nper s", format=".1f", better="higher")
    of_data_parallel: float | None = figure("of data-\nparallel", format=".2f", better="higher", default=None)
    of_uncompressed: float | None = figure("of un-\ncompressed", format=".2f", better="higher", default=None)
    of_torch: float | None = figure("of torch's\nstage", format=".2f", better="higher", default=None)
    step_p25_ms: float = figure("step\np25 ms", format=".1f")
    step_ms: float = figure("step\nms", format=".1f", better="lower")
    step_p75_ms: float = figure("step\np75 ms", format=".1f")
    step_p95_ms: float = figure("step\np95 ms", format=".1f", better="lower")
    busiest_compute_p25_ms: float = figure("busiest\np25 ms", format=".1f")
    busiest_compute_ms: float = figure("busiest\nworker ms", format=".1f")
    busiest_compute_p75_ms: float = figure("busiest\np75 ms", format=".1f")
    busiest_wire_ms: float = figure("busiest\nlink ms", format=".1f")
    delay_ms: float = figure("delays\nms", format=".1f")
    bound_ms: float = figure("bound\nms", format=".1f")
    order_ms: float | None = figure("order\nms", format=".1f", default=None)
    of_bound: float = figure("bound /\nstep", format=".2f", better="higher")
    tensor_bytes: int = figure("tensor\nbytes", format="d")
    wire_bytes: int = figure("wire\nbytes", format="d", better="lower")
    busiest_wire_bytes: int = figure("busiest\nbytes", format="d", better="lower")
    peak_mib: float | None = figure("peak MiB\nper worker", format=".0f", better="lower")
    times: StepTimes = field(default_factory=StepTimes)
    bubble: float | None = figure("bubble", format=".2f", better="lower", default=None)
    bubble_theory: float | None = figure("bubble\nin theory", format=".2f", default=None)
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
        step_p25_ms=float(np.percentile(first.samples_ms, 25)),
        step_ms=step_ms,
        step_p75_ms=float(np.percentile(first.samples_ms, 75)),
        step_p95_ms=float(np.percentile(first.samples_ms, 95)),
        busiest_compute_p25_ms=float(np.percentile(busiest.compute_samples_ms, 25)),
        busiest_compute_ms=bound.compute_ms,
        busiest_compute_p75_ms=float(np.percentile(busiest.compute_samples_ms, 75)),
        busiest_wire_ms=bound.wire_ms,
        delay_ms=bound.delay_ms,
        bound_ms=bound.least_ms,
        of_bound=bound.least_ms / step_ms,
        tensor_bytes=tensor_bytes,
        wire_bytes=wire_bytes,
        busiest_wire_bytes=bound.wire_bytes,
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


@dataclass(frozen=True)
class Hop:
    """The traffic of one hop of a chunk's way, per step."""

    source: int
    target: int
    wire_bytes: int


@dataclass(frozen=True)
class Busy:
    """The compute time of one worker per step."""

    module_ms: float
    update_ms: float  # after forward and backward, when other workers need not wait for it


@dataclass(frozen=True)
class Bound:
    """The least time of a step, and its components."""

    compute_ms: float  # of the busiest worker
    wire_ms: float  # of the busiest queue of a link, at its rate
    wire_bytes: int  # of that queue
    delay_ms: float  # sum over all hops of a chunk
    least_ms: float


def hops_of(links: Sequence[LinkReport], steps: int) -> list[Hop]:
    """Return the hops in the order of a chunk: activations to the last stage, gradients back."""
    forward = sorted((link for link in links if link.target > link.source), key=lambda link: link.source)
    backward = sorted((link for link in links if link.target < link.source), key=lambda link: -link.source)
    return [Hop(link.source_worker, link.target_worker, link.wire_bytes // steps) for link in (*forward, *backward)]


def bound_of_pipeline(link: Shaping | None, hops: Sequence[Hop], workers: Sequence[Busy]) -> Bound:
    """Return the bound of a pipeline: the busy time of each worker and queue, plus the delays before and after."""
    ways = (link or Shaping(Shape())).ways(len(workers))
    delays = [ways[hop.source, hop.target].shape.delay_ms for hop in hops]
    before = [0.0, *accumulate(delays)]  # delay of the hops up to each place of a chunk's way
    after = [before[-1] - passed for passed in before]
    wire_bytes: dict[Queue, int] = {}
    least = [before[-1]]
    for queue in dict.fromkeys(queue for hop in hops for queue in ways[hop.source, hop.target].queues):
        places = [place for place, hop in enumerate(hops) if queue in ways[hop.source, hop.target].queues]
        wire_bytes[queue] = sum(hops[place].wire_bytes for place in places)
        least.append(before[places[0]] + queue.wire_ms(wire_bytes[queue]) + after[places[-1]])
    for worker, busy in enumerate(workers):
        places = [place for place in range(len(before)) if worker in _workers_at(hops, place)] or [0]
        begun_ms = before[places[0]] + busy.module_ms
        least.append(begun_ms + max(busy.update_ms, after[places[-1]]))
    return _bound(workers, wire_bytes, before[-1], max(least))


def bound_of_replicas(link: Shaping | None, parameter_bytes: int, workers: Sequence[Busy]) -> Bound:
    """Return the bound of data-parallel training: a ring all-reduce of gradients, and one delay."""
    size = len(workers)
    ways = (link or Shaping(Shape())).ways(size)
    wire_bytes: dict[Queue, int] = {}
    delay_ms = 0.0
    for source in range(size if size > 1 else 0):
        way = ways[source, (source + 1) % size]
        wire_bytes |= dict.fromkeys(way.queues, ring_bytes(parameter_bytes, size))
        delay_ms = max(delay_ms, way.shape.delay_ms)
    wires = [queue.wire_ms(size) for queue, size in wire_bytes.items()]
    return _bound(workers, wire_bytes, delay_ms, max(wires, default=0.0) + delay_ms)


def _bound(workers: Sequence[Busy], wire_bytes: Mapping[Queue, int], delay_ms: float, least_ms: float) -> Bound:
    compute_ms = max(busy.module_ms + busy.update_ms for busy in workers)
    busiest = max(((queue.wire_ms(size), size) for queue, size in wire_bytes.items()), default=(0.0, 0))
    return Bound(compute_ms, *busiest, delay_ms, max(least_ms, compute_ms))


def _workers_at(hops: Sequence[Hop], place: int) -> set[int]:
    """Return the workers that compute on a chunk after ``place`` hops."""
    arrived = {hops[place - 1].target} if place else set()
    return arrived | ({hops[place].source} if place < len(hops) else set())


def ring_bytes(gradient_bytes: int, workers: int) -> int:
    """Return the bytes that each replica sends in a ring all-reduce: twice all but its own part."""
    return 2 * (workers - 1) * gradient_bytes // workers
