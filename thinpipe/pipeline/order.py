"""Schedules as plain data: the order of forwards and backwards on each worker.

An order is a list of actions per worker. Every order made here is a valid execution: it was simulated, or is valid by
construction. Workers block only for messages that others send earlier in their own lists, so no combination of workers,
chunks and order can deadlock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Literal, NamedTuple

Order = str  # see ORDERS
ORDERS = "gpipe, 1f1b, or 1f1b:N with at most N chunks in flight"


class Action(NamedTuple):
    """The forward or backward of one chunk through one stage."""

    stage: int
    kind: Literal["F", "B"]
    chunk: int


def make_order(order: Order, placement: Sequence[int], chunks: int) -> dict[int, list[Action]]:
    """Return the actions of every worker; ``placement[stage]`` is the worker that has the stage."""
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
    """Return the chunks that the first stage computes before it needs the gradients of the first of them."""
    name, _, most = order.partition(":")
    return chunks if name == "gpipe" else int(most or stages)


def needed_in_flight(stages: int, delay_ms: float, chunk_ms: float) -> int:
    """Return the chunks in flight that keep workers busy if each computes ``chunk_ms`` and messages take ``delay_ms``.

    A chunk returns to the first stage after ``stages`` computations and one delay per link in each direction.
    """
    return stages + math.ceil(2 * (stages - 1) * delay_ms / max(chunk_ms, 1e-3))


def gpipe(placement: Sequence[int], chunks: int) -> dict[int, list[Action]]:
    """Return the GPipe order: all forwards, then all backwards; the last stage runs each backward immediately.

    So the backward link is busy early. All stages but the last hold the activations of all chunks. The client of a
    pipeline with placement [0, 1, 0] and two chunks: F0 F0 F2 B2 F2 B2 B0 B0.
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
    """Return the 1F1B order: backwards as early as possible; the first stage holds ``most`` chunks, the last one."""
    return _spaced(placement, chunks, most) if most > len(placement) else _simulated(placement, chunks, most)


def _spaced(placement: Sequence[int], chunks: int, most: int) -> dict[int, list[Action]]:
    """Return 1F1B for links with a long delay: ``most`` chunks in flight, evenly spaced over forward and backward.

    A chunk starts every ``apart`` ticks and reaches its next place ``most`` - 1 ticks later, whatever time a worker or
    link takes: no worker waits for a message that was just sent, and gradients are sent between activations, not after
    them. The client of a pipeline with placement [0, 1, 0] and ``most`` 5: F0 F0 F0, F2 B2 F0 twice, F2 B2 B0 F0 ...
    """
    last = len(placement) - 1
    apart = max(2 * last, 1)

    def tick(action: Action) -> tuple[int, int, bool]:
        place = action.stage if action.kind == "F" else 2 * last - action.stage
        return action.chunk * apart + place * (most - 1), place, action.kind == "B"

    # The input of an action is produced at an earlier tick, or, on the last stage, just before it.
    actions = [Action(stage, kind, c) for stage in range(last + 1) for kind in ("F", "B") for c in range(chunks)]
    actions.sort(key=tick)
    orders: dict[int, list[Action]] = {worker: [] for worker in sorted(set(placement))}
    for action in actions:
        orders[placement[action.stage]].append(action)
    return orders


def _simulated(placement: Sequence[int], chunks: int, most: int) -> dict[int, list[Action]]:
    """Return 1F1B for links that take no time, by simulation: a forward takes 1 and a backward 2.

    A free worker starts the first action that is ready, backwards before forwards and late stages before early ones.
    A worker is looked at when it becomes free and when an input of it is ready.
    """
    stages = len(placement)
    links = max(stages - 1, 1)
    workers = sorted(set(placement))
    mine = {worker: [stage for stage in reversed(range(stages)) if placement[stage] == worker] for worker in workers}
    free_at = dict.fromkeys(workers, 0)
    orders: dict[int, list[Action]] = {worker: [] for worker in workers}
    forwards, backwards = [0] * stages, [0] * stages  # started
    done: dict[str, list[list[int]]] = {kind: [[] for _ in range(stages)] for kind in "FB"}  # when each chunk is

    def ready(kind: str, stage: int, time: int) -> bool:
        chunk = backwards[stage] if kind == "B" else forwards[stage]
        held = chunk - backwards[stage]
        if chunk >= chunks or (kind == "F" and held > math.ceil((most - 1) * (stages - 1 - stage) / links)):
            return False
        needs = [done["F"][stage]] if kind == "B" else []
        if kind == "F" and stage > 0:
            needs.append(done["F"][stage - 1])
        if kind == "B" and stage < stages - 1:
            needs.append(done["B"][stage + 1])
        return all(chunk < len(ends) and ends[chunk] <= time for ends in needs)

    looks = {0: set(workers)}  # by time
    times = [0]
    while times:
        time = heappop(times)
        for worker in looks.pop(time):
            if free_at[worker] > time:
                continue
            for kind, stage in ((kind, stage) for kind in ("B", "F") for stage in mine[worker]):
                if not ready(kind, stage, time):
                    continue
                started = backwards if kind == "B" else forwards
                orders[worker].append(Action(stage, "B" if kind == "B" else "F", started[stage]))
                started[stage] += 1
                free_at[worker] = ended = time + (1 if kind == "F" else 2)
                done[kind][stage].append(ended)
                neighbour = stage + (1 if kind == "F" else -1)
                if ended not in looks:
                    looks[ended] = set()
                    heappush(times, ended)
                looks[ended] |= {worker, placement[neighbour]} if 0 <= neighbour < stages else {worker}
                break
    return orders
