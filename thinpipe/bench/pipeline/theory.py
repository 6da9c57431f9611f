"""What a step could take at best: its bound by the busiest worker and direction, and the bubble of its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from thinpipe.pipeline.order import Action
from thinpipe.pipeline.report import LinkReport


def busiest_direction_bytes(links: Sequence[LinkReport]) -> int:
    """The most that any worker sends, or receives: it has one link into the network, as wide in both directions."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for link in links:
        sent[link.source_worker] += link.wire_bytes
        received[link.target_worker] += link.wire_bytes
    return max([*sent.values(), *received.values()], default=0)


def ring_bytes(gradient_bytes: int, workers: int) -> int:
    """What each replica sends to average gradients with all others in a ring: all but its own part, twice."""
    return 2 * (workers - 1) * gradient_bytes // workers


def wire_ms(wire_bytes: float, mbit_per_s: float | None) -> float:
    """The time so many bytes take at the rate of a link; none where it is not shaped."""
    return 0.0 if mbit_per_s is None else wire_bytes * 8 / (mbit_per_s * 1e3)


def makespan(orders: Mapping[int, Sequence[Action]], cost: Callable[[Action], float]) -> float:
    """How long an order takes on links that take no time.

    Two stages on two workers, 4 chunks, a forward takes 1, a backward 2: 3 x 4 for the work, 3 to fill and drain.
    """
    done: dict[Action, float] = {}
    stages = 1 + max(action.stage for actions in orders.values() for action in actions)
    free = dict.fromkeys(orders, 0.0)
    todo = {worker: list(actions) for worker, actions in orders.items()}
    while any(todo.values()):
        for worker, actions in todo.items():
            while actions and (ready := _ready_at(actions[0], stages, done)) is not None:
                action = actions.pop(0)
                free[worker] = done[action] = max(free[worker], ready) + cost(action)
    return max(free.values())


def _ready_at(action: Action, stages: int, done: Mapping[Action, float]) -> float | None:
    """When what an action needs from a neighbour is there; None if that is not known yet."""
    neighbour = action.stage + (-1 if action.kind == "F" else 1)
    if not 0 <= neighbour < stages:
        return 0.0
    return done.get(Action(neighbour, action.kind, action.chunk))
