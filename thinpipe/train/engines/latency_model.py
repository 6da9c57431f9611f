"""A latency model of links: the duration of an order, and the number of chunks in flight that ``1f1b`` needs.

The bytes of every message, and the configured rates and delays of links, are known before the first step. Compute times
are not. They are assumed to equal the transfer time of the busiest direction of a link, distributed over the stages by
their operations: then neither hides behind the other, the case that needs the most chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from thinpipe.pipeline.order import Action, Order, make_order
from thinpipe.train.engines.simulator import ActionCost, Hop, LinkCost, simulate
from thinpipe.train.shaping import Queue, Shape, Shaping

_TOLERANCE = 1.01  # the smallest number of chunks within 1 % of the best time is taken, to save memory
_MAX_SIMULATED = 256  # chunks that are simulated, which takes a second for many stages: longer steps are periodic


def choose_order(
    order: Order,
    placement: Sequence[int],
    chunks: int,
    links: Shaping | None,
    wire_bytes: Mapping[Hop, int],
    operations: Sequence[float],
    fits: Callable[[Order], bool] = lambda order: True,
) -> Order:
    """Return ``1f1b`` as ``1f1b:N`` if links have a delay, and every other order unchanged.

    ``wire_bytes`` are per chunk, ``operations`` per stage. ``fits`` returns whether an order fits into memory; if none
    fits, ``1f1b`` is returned unchanged.
    """
    costs = link_costs(links, placement, wire_bytes, patient=True)
    if order != "1f1b" or not any(each.delay_ms for each in costs.values()):
        return order
    load: dict[Queue, float] = defaultdict(float)
    for each in costs.values():
        for queue in each.queues:
            load[queue] += queue.wire_ms(each.wire_bytes)
    wire_ms = max(load.values())
    if wire_ms:
        chunks = min(chunks, _MAX_SIMULATED)
    candidates = [each for each in _candidates(len(placement), chunks) if fits(_named(each, placement))]
    if not candidates:
        return order
    if not wire_ms:  # no number of chunks fills a link without a rate
        return _named(candidates[-1], placement)
    worker_operations = [
        sum(count for count, place in zip(operations, placement, strict=True) if place == worker)
        for worker in set(placement)
    ]
    ms = wire_ms / max(worker_operations)

    def duration(action: Action) -> float:
        return operations[action.stage] * ms * (1 if action.kind == "F" else 2) / 3

    took = {
        most: makespan(make_order(_named(most, placement), placement, chunks), duration, costs) for most in candidates
    }
    return _named(next(most for most in took if took[most] <= _TOLERANCE * min(took.values())), placement)


def makespan(
    orders: Mapping[int, Sequence[Action]],
    duration: Callable[[Action], float],
    costs: Mapping[Hop, LinkCost] | None = None,
) -> float:
    """Return the simulated duration of an order; without costs, links take no time.

    ``duration`` depends on stage and kind only.
    Two stages on two workers, 4 chunks, a forward takes 1, a backward 2: 3 x 4 for the work, 3 to fill and drain.
    """
    actions = {action[:2]: action for each in orders.values() for action in each}
    times = {key: ActionCost(duration(action)) for key, action in actions.items()}
    return simulate(orders, times, costs).step_ms


def link_costs(
    links: Shaping | None, placement: Sequence[int], wire_bytes: Mapping[Hop, int], *, patient: bool = False
) -> dict[Hop, LinkCost]:
    """Return the cost of every hop; ``patient``: with the longest delay, times three if packets are lost.

    TCP retransmits a lost packet one round trip later, and later packets wait for it.
    """
    paths = (links or Shaping(Shape())).paths(max(placement) + 1)
    found = {}
    for (source, target), size in wire_bytes.items():
        path = paths[placement[source], placement[target]]
        delay_ms = path.shape.delay_ms
        if patient:
            delay_ms = (delay_ms + path.shape.jitter_ms) * (3 if path.shape.loss else 1)
        found[source, target] = LinkCost(path.queues, size, delay_ms)
    return found


def _candidates(stages: int, chunks: int) -> Iterator[int]:
    """Yield candidate numbers of chunks from ``stages`` to ``chunks``, in growing steps."""
    most = stages
    while most < chunks:
        yield most
        most += max(most // 4, 1)
    yield max(chunks, stages)


def _named(most: int, placement: Sequence[int]) -> Order:
    return "1f1b" if most == len(placement) else f"1f1b:{most}"
