"""Who computes what when: the order of forwards and backwards on each worker, as plain data.

An order is a list of actions per worker. Every order made here is a run that could have happened: some simulated or
obvious execution went through it, so on real workers, which block only for messages that others send earlier in
theirs, no combination of workers, chunks and order can deadlock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Order = str  # as ORDERS says
ORDERS = "gpipe, 1f1b, or 1f1b:N with at most N chunks on their way"


class Action(NamedTuple):
    """One chunk through one stage."""

    stage: int
    kind: Literal["F", "B"]
    chunk: int


def make_order(order: Order, placement: Sequence[int], chunks: int) -> dict[int, list[Action]]:
    """The actions of every worker; ``placement[stage]`` is the worker that has the stage."""
    if not is_order(order):
        raise ValueError(f"an order is {ORDERS}; got {order!r}")
    if chunks < 1:
        raise ValueError(f"a batch is cut into 1 chunk or more, got {chunks}")
    if order == "gpipe":
        return gpipe(placement, chunks)
    return one_f_one_b(placement, chunks, in_flight(order, len(placement), chunks))


def is_order(text: str) -> bool:
    return re.fullmatch(r"gpipe|1f1b(:[1-9]\d{0,5})?", text) is not None


def in_flight(order: Order, stages: int, chunks: int) -> int:
    """How many chunks the first stage computes before it needs the gradients of the first of them."""
    name, _, most = order.partition(":")
    return chunks if name == "gpipe" else int(most or stages)


def gpipe(placement: Sequence[int], chunks: int) -> dict[int, list[Action]]:
    """All forwards, then all backwards; the last stage goes back with each chunk at once, and so fills the link.

    All stages but the last hold the activations of all chunks. The client of a pipeline with placement [0, 1, 0] and
    two chunks: F0 F0 F2 B2 F2 B2 B0 B0.
    """
    *early, last = range(len(placement))

    def each(stages: Sequence[int], kinds: Sequence[Literal["F", "B"]], worker: int) -> list[Action]:
        here = [stage for stage in stages if placement[stage] == worker]
        return [Action(stage, kind, chunk) for stage in here for chunk in range(chunks) for kind in kinds]

    return {
        worker: [*each(early, ["F"], worker), *each([last], ["F", "B"], worker), *each(early[::-1], ["B"], worker)]
        for worker in sorted(set(placement))
    }


def one_f_one_b(placement: Sequence[int], chunks: int, most: int) -> dict[int, list[Action]]:
    """A backward as soon as there is one: the first stage holds the activations of ``most`` chunks, the last of one."""
    return _spaced(placement, chunks, most) if most > len(placement) else _simulated(placement, chunks, most)


def _spaced(placement: Sequence[int], chunks: int, most: int) -> dict[int, list[Action]]:
    """For links that take long: ``most`` chunks, evenly spaced on their way through all stages and back again.

    A chunk starts every ``apart`` ticks and is at its next place ``most`` - 1 ticks later, however long a worker or a
    link takes for it: no worker waits for what has just been sent, and gradients leave between activations, not behind
    them. The client of a pipeline with placement [0, 1, 0] and ``most`` 5: F0 F0 F0, F2 B2 F0 twice, F2 B2 B0 F0 ...
    """
    last = len(placement) - 1
    apart = max(2 * last, 1)

    def tick(action: Action) -> tuple[int, int, bool]:
        place = action.stage if action.kind == "F" else 2 * last - action.stage
        return action.chunk * apart + place * (most - 1), place, action.kind == "B"

    # What an action needs is at an earlier tick, or, on the last stage, just before it.
    actions = [Action(stage, kind, c) for stage in range(last + 1) for kind in ("F", "B") for c in range(chunks)]
    actions.sort(key=tick)
    workers = sorted(set(placement))
    return {worker: [action for action in actions if placement[action.stage] == worker] for worker in workers}


def _simulated(placement: Sequence[int], chunks: int, most: int) -> dict[int, list[Action]]:
    """For links that take no time: a forward takes 1 and a backward 2.

    A free worker starts the first action that is ready, backwards before forwards and late stages before early ones.
    """
    stages = len(placement)
    links = max(stages - 1, 1)
    workers = sorted(set(placement))
    done_at: dict[Action, float] = {}
    free_at = dict.fromkeys(workers, 0.0)
    orders: dict[int, list[Action]] = {worker: [] for worker in workers}
    started = {(stage, kind): 0 for stage in range(stages) for kind in "FB"}
    time = 0.0

    def ready(action: Action) -> bool:
        stage, kind, chunk = action
        held = chunk - started[stage, "B"]
        if chunk >= chunks or (kind == "F" and held > math.ceil((most - 1) * (stages - 1 - stage) / links)):
            return False
        needs = [Action(stage, "F", chunk)] if kind == "B" else []
        if kind == "F" and stage > 0:
            needs.append(Action(stage - 1, "F", chunk))
        if kind == "B" and stage < stages - 1:
            needs.append(Action(stage + 1, "B", chunk))
        return all(done_at.get(need, float("inf")) <= time for need in needs)

    while len(done_at) < 2 * stages * chunks:
        for worker in workers:
            if free_at[worker] > time:
                continue
            mine = [stage for stage in reversed(range(stages)) if placement[stage] == worker]
            candidates = [Action(s, kind, started[s, kind]) for kind in ("B", "F") for s in mine]
            chosen = next((action for action in candidates if ready(action)), None)
            if chosen is not None:
                started[chosen.stage, chosen.kind] += 1
                free_at[worker] = done_at[chosen] = time + (1 if chosen.kind == "F" else 2)
                orders[worker].append(chosen)
        time += 1
    return orders
