"""The lower bound of the step time of a pipeline and of data-parallel training.

The bound is the least time that a step can take: the time of its busiest worker or link, plus the delays before and
after. With a client and a server, one way 20 ms, a chunk passes four hops, one after the other::

    client  F |--20-->          >--20--|  F B  |--20-->          >--20--|  B   client
    server             | F |                            | B |

The server is idle in the first and in the last 20 ms of a step, so its bound is its compute time plus 40 ms. The link
to it is busy from the beginning, but the result of its last message must return: also 40 ms more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from thinpipe.lab.records.record import column
from thinpipe.pipeline.report import LinkReport
from thinpipe.train.shaping import Queue, Shape, Shaping


@dataclass(frozen=True)
class Hop:
    """The traffic of one hop on a chunk's path, per step."""

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

    busiest_compute_ms: float = column("busiest\nworker ms", format=".1f")
    busiest_wire_ms: float = column("busiest\nlink ms", format=".1f")  # of a queue of a link, at its rate
    busiest_wire_bytes: int = column("busiest\nbytes", format="d", better="lower")  # of that queue
    delay_ms: float = column("delays\nms", format=".1f")  # sum over all hops of a chunk
    bound_ms: float = column("bound\nms", format=".1f")


def hops_of(links: Sequence[LinkReport], steps: int) -> list[Hop]:
    """Return the hops in the order of a chunk: activations to the last stage, gradients back."""
    forward = sorted((link for link in links if link.target > link.source), key=lambda link: link.source)
    backward = sorted((link for link in links if link.target < link.source), key=lambda link: -link.source)
    return [Hop(link.source_worker, link.target_worker, link.wire_bytes // steps) for link in (*forward, *backward)]


def bound_of_pipeline(link: Shaping | None, hops: Sequence[Hop], workers: Sequence[Busy]) -> Bound:
    """Return the bound of a pipeline: the busy time of each worker and queue, plus the delays before and after."""
    paths = (link or Shaping(Shape())).paths(len(workers))
    delays = [paths[hop.source, hop.target].shape.delay_ms for hop in hops]
    before = [0.0, *accumulate(delays)]  # delay of the hops up to each place on a chunk's path
    after = [before[-1] - passed for passed in before]
    wire_bytes: dict[Queue, int] = {}
    least = [before[-1]]
    for queue in dict.fromkeys(queue for hop in hops for queue in paths[hop.source, hop.target].queues):
        places = [place for place, hop in enumerate(hops) if queue in paths[hop.source, hop.target].queues]
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
    paths = (link or Shaping(Shape())).paths(size)
    wire_bytes: dict[Queue, int] = {}
    delay_ms = 0.0
    for source in range(size if size > 1 else 0):
        path = paths[source, (source + 1) % size]
        wire_bytes |= dict.fromkeys(path.queues, ring_bytes(parameter_bytes, size))
        delay_ms = max(delay_ms, path.shape.delay_ms)
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
