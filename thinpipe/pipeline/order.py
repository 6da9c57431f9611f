"""Who computes what when: the order of forwards and backwards on each worker, as plain data.

An order is a list of actions per worker. Every order made here is a run that could have happened: some simulated or
obvious execution went through it, so on real workers, which block only for messages that others send earlier in
theirs, no combination of workers, chunks and order can deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

Order = Literal["gpipe", "1f1b"]


class Action(NamedTuple):
    """One chunk through one stage."""

    stage: int
    kind: Literal["F", "B"]
    chunk: int


def make_order(order: Order, placement: Sequence[int], chunks: int) -> dict[int, list[Action]]:
    """The actions of every worker; ``placement[stage]`` is the worker that has the stage."""
    if order not in get_args(Order):
        raise ValueError(f"an order is {' or '.join(map(repr, get_args(Order)))}, got {order!r}")
    if chunks < 1:
        raise ValueError(f"a batch is cut into 1 chunk or more, got {chunks}")
    return gpipe(placement, chunks) if order == "gpipe" else one_f_one_b(placement, chunks)


def gpipe(placement: Sequence[int], chunks: int) -> dict[int, list[Action]]:
    """All forwards, then all backwards: simple, and every worker holds the activations of all chunks.

    The client of a pipeline with placement [0, 1, 0] and one chunk: F0 F2 B2 B0.
    """
    stages = range(len(placement))
    return {
        worker: [Action(s, "F", c) for s in stages if placement[s] == worker for c in range(chunks)]
        + [Action(s, "B", c) for s in reversed(stages) if placement[s] == worker for c in range(chunks)]
        for worker in sorted(set(placement))
    }


def one_f_one_b(placement: Sequence[int], chunks: int) -> dict[int, list[Action]]:
    """A backward as soon as there is one: stage s of S holds the activations of at most S - s chunks.

    Simulated: time passes, a forward takes 1 and a backward 2, and a free worker starts the first action that is
    ready, backwards before forwards and late stages before early ones.
    """
    stages = len(placement)
    workers = sorted(set(placement))
    done_at: dict[Action, float] = {}
    free_at = dict.fromkeys(workers, 0.0)
    orders: dict[int, list[Action]] = {worker: [] for worker in workers}
    started = {(stage, kind): 0 for stage in range(stages) for kind in "FB"}
    time = 0.0

    def ready(action: Action) -> bool:
        stage, kind, chunk = action
        if chunk >= chunks or (kind == "F" and chunk - started[stage, "B"] >= stages - stage):
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
