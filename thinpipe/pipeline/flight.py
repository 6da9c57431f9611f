"""How long an order takes where links take time, and how many chunks ``1f1b`` has on their way there.

What is known before the first step: the bytes of every message, and the rates and delays of links that were asked for.
How long workers compute is not. It is taken to be as long as the busiest direction of a link needs for its bytes,
shared among the stages as their operations are: neither hides behind the other then, which needs the most chunks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from thinpipe.comm.shaping import Queue, Shape, Shaping
from thinpipe.pipeline.order import Action, Order, make_order

Hop = tuple[int, int]  # from a stage to its neighbour
_SLACK = 1.01  # of numbers of chunks that take up to 1 % longer than the best, the smallest is taken: it needs memory
_ENOUGH = 256  # chunks that are looked at, which takes a second for many stages: longer steps go on alike


@dataclass(frozen=True)
class Passage:
    """The way of one chunk's messages from a stage to its neighbour."""

    queues: tuple[Queue, ...]
    wire_bytes: int
    delay_ms: float


def choose_order(
    order: Order,
    placement: Sequence[int],
    chunks: int,
    links: Shaping | None,
    wire_bytes: Mapping[Hop, int],
    operations: Sequence[float],
    fits: Callable[[Order], bool] = lambda order: True,
) -> Order:
    """``1f1b`` as ``1f1b:N`` where links have a delay; every other order as it is.

    ``wire_bytes`` are those of one chunk, ``operations`` those of every stage. ``fits``: whether memory is enough for
    an order; where it is enough for none, ``1f1b`` stays as it is.
    """
    passages = passages_of(links, placement, wire_bytes, patient=True)
    if order != "1f1b" or not any(each.delay_ms for each in passages.values()):
        return order
    load: dict[Queue, float] = defaultdict(float)
    for each in passages.values():
        for queue in each.queues:
            load[queue] += queue.wire_ms(each.wire_bytes)
    wire_ms = max(load.values())
    if wire_ms:
        chunks = min(chunks, _ENOUGH)
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

    def cost(action: Action) -> float:
        return operations[action.stage] * ms * (1 if action.kind == "F" else 2) / 3

    took = {
        most: makespan(make_order(_named(most, placement), placement, chunks), cost, passages) for most in candidates
    }
    return _named(next(most for most in took if took[most] <= _SLACK * min(took.values())), placement)


def makespan(
    orders: Mapping[int, Sequence[Action]],
    cost: Callable[[Action], float],
    passages: Mapping[Hop, Passage] | None = None,
) -> float:
    """How long an order takes; without passages, on links that take no time.

    Two stages on two workers, 4 chunks, a forward takes 1, a backward 2: 3 x 4 for the work, 3 to fill and drain.
    """
    last = max(action.stage for actions in orders.values() for action in actions)
    todo = {worker: deque(actions) for worker, actions in orders.items()}
    free = dict.fromkeys(orders, 0.0)
    left = defaultdict[Queue, float](float)  # when the last message has
    there: dict[Action, float] = {}  # when what an action needs from a neighbour is

    def ready() -> Iterator[tuple[float, int]]:
        for worker, actions in todo.items():
            if actions:
                begins = (actions[0].stage, actions[0].kind) in ((0, "F"), (last, "B"))
                needed = 0.0 if begins else there.get(actions[0])
                if needed is not None:
                    yield max(free[worker], needed), worker

    while any(todo.values()):
        began, worker = min(ready())
        action = todo[worker].popleft()
        free[worker] = ended = began + cost(action)
        neighbour = action.stage + (1 if action.kind == "F" else -1)
        passage = (passages or {}).get((action.stage, neighbour))
        if passage is not None:
            begins = max([ended, *(left[queue] for queue in passage.queues)])
            for queue in passage.queues:
                left[queue] = begins + queue.wire_ms(passage.wire_bytes)
            ended = max([ended, *(left[queue] for queue in passage.queues)]) + passage.delay_ms
        there[Action(neighbour, action.kind, action.chunk)] = ended
    return max(free.values())


def passages_of(
    links: Shaping | None, placement: Sequence[int], wire_bytes: Mapping[Hop, int], *, patient: bool = False
) -> dict[Hop, Passage]:
    """The ways of one chunk's bytes; ``patient``: with the longest delay, and three times that where packets are lost.

    TCP sends a lost packet again a round trip later, and what came after it waits.
    """
    ways = (links or Shaping(Shape())).ways(max(placement) + 1)
    found = {}
    for (source, target), size in wire_bytes.items():
        way = ways[placement[source], placement[target]]
        delay_ms = way.shape.delay_ms
        if patient:
            delay_ms = (delay_ms + way.shape.jitter_ms) * (3 if way.shape.loss else 1)
        found[source, target] = Passage(way.queues, size, delay_ms)
    return found


def _candidates(stages: int, chunks: int) -> Iterator[int]:
    """From as many as there are stages to all, all small numbers and ever fewer large ones."""
    most = stages
    while most < chunks:
        yield most
        most += max(most // 4, 1)
    yield max(chunks, stages)


def _named(most: int, placement: Sequence[int]) -> Order:
    return "1f1b" if most == len(placement) else f"1f1b:{most}"
