"""The least time that a step can take: what its busiest worker or link needs, and the delays around that.

Client and server, one way 20 ms. A chunk passes four hops, one after the other::

    client  F |--20-->          >--20--|  F B  |--20-->          >--20--|  B   client
    server             | F |                            | B |

Nothing happens on the server in the first 20 ms of a step and in the last, so what it computes takes 40 ms more. The
link towards it is busy from the beginning, but what it brings last must be answered: 40 ms more, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from thinpipe.pipeline.report import LinkReport
from thinpipe.workers.shape import Queue, Shape, Shaping


@dataclass(frozen=True)
class Hop:
    """What one worker sends to another in a step."""

    source: int
    target: int
    wire_bytes: int


@dataclass(frozen=True)
class Busy:
    """What keeps one worker busy in a step."""

    module_ms: float
    update_ms: float  # after all else, when others need not wait for it


@dataclass(frozen=True)
class Bound:
    """The least time of a step, and what it follows from."""

    compute_ms: float  # of the busiest worker
    wire_ms: float  # of the busiest queue of a link, at its rate
    wire_bytes: int  # that pass it
    delay_ms: float  # of all hops of a chunk
    least_ms: float


def hops_of(links: Sequence[LinkReport], steps: int) -> list[Hop]:
    """In the order in which a chunk passes them: activations to the last stage, gradients back."""
    forward = sorted((link for link in links if link.target > link.source), key=lambda link: link.source)
    backward = sorted((link for link in links if link.target < link.source), key=lambda link: -link.source)
    return [Hop(link.source_worker, link.target_worker, link.wire_bytes // steps) for link in (*forward, *backward)]


def bound_of_pipeline(link: Shaping | None, hops: Sequence[Hop], workers: Sequence[Busy]) -> Bound:
    """Every worker and every queue is busy for so long; before its first work and after its last come delays."""
    ways = (link or Shaping(Shape())).ways(len(workers))
    delays = [ways[hop.source, hop.target].shape.delay_ms for hop in hops]
    before = [0.0, *accumulate(delays)]  # of the hops up to each place of a chunk's way
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
    """Gradients go around in a ring, and the last of them must arrive."""
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
    """Who computes on a chunk after so many hops."""
    arrived = {hops[place - 1].target} if place else set()
    return arrived | ({hops[place].source} if place < len(hops) else set())


def ring_bytes(gradient_bytes: int, workers: int) -> int:
    """What each replica sends to average gradients with all others in a ring: all but its own part, twice."""
    return 2 * (workers - 1) * gradient_bytes // workers
