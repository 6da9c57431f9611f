"""A simulator of training steps: when every worker computes and every message arrives, in the order of the schedules.

    worker 0   F0 encode | F1 encode |                      decode B0 | ... statistics | update | next step
    queues        [ message 0 ][ message 1 ]                [ gradient 0 ]
    worker 1              <- delay ->  decode F0 B0 encode |

An action begins when its worker is free and its input has arrived (1). At its end its message enters the queues of the
link, behind earlier messages (2), and arrives after the transmission and the delay (3). Sends never block a worker:
receives are posted ahead, as links do on backends with tags. At the end of a step every worker sends its statistics to
all others and updates its parameters when all have arrived (4); then its next step begins.

Actions are processed in the order of their ends, so messages enter shared queues in the order of time. If more workers
compute on one machine at a time, all of these are slowed down alike (5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinpipe.pipeline.order import Action
from thinpipe.train.shaping import Queue

Hop = tuple[int, int]  # from a stage to its neighbour
Key = tuple[int, Literal["F", "B"]]  # a stage, and a forward or a backward of it


@dataclass(frozen=True)
class LinkCost:
    """The cost of sending one chunk from a stage to its neighbour: queues, bytes and delay."""

    queues: tuple[Queue, ...]
    wire_bytes: int
    delay_ms: float


class ActionCost(NamedTuple):
    """The duration of a stage's forward or backward of one chunk, and of its codecs."""

    compute_ms: float
    decode_ms: float = 0.0  # of the input, before
    encode_ms: float = 0.0  # of the output, after


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """The end of a step: statistics of all workers, and the update."""

    delay_ms: NDArray[np.float64]  # of a message from each worker (row) to each other
    before_ms: Sequence[float]  # by worker, from its last action to sending its statistics
    update_ms: Sequence[float]  # by worker


class Interval(NamedTuple):
    """An action as it was simulated, in ms."""

    worker: int
    action: Action
    arrived: float | None  # its input; None if it had none from another worker
    began: float
    ended: float


@dataclass
class Simulated:
    """The result of a simulation."""

    ends: list[list[float]]  # by step and worker, in ms
    busy_ms: list[float]  # by worker, of all steps
    queue_ms: dict[Queue, float]  # of all steps, transmissions only
    intervals: list[Interval] = field(default_factory=list)  # of the last step, if they were recorded

    @property
    def step_ms(self) -> float:
        """The duration of the last step, from the end of the one before, on the worker that ended last."""
        last = self.ends[-1]
        slowest = int(np.argmax(last))
        return last[slowest] - (self.ends[-2][slowest] if len(self.ends) > 1 else 0.0)


def simulate(
    orders: Mapping[int, Sequence[Action]],
    costs: Mapping[Key, ActionCost],
    links: Mapping[Hop, LinkCost] | None = None,
    *,
    end: StepEnd | None = None,
    steps: int = 1,
    slowdown: Sequence[float] = (),
    record: bool = False,
) -> Simulated:
    """Return the times of ``steps`` steps of an order; ``costs`` are by stage and kind, ``"F"`` or ``"B"``.

    Without links, messages take no time; without an end, a step ends with the last action of each worker.
    ``slowdown``: of every worker while one, two, ... of them compute on the machine that all share.
    """
    run = _Run(orders, costs, links or {}, slowdown)
    free, ends = [0.0] * len(orders), []
    for step in range(steps):
        free = run.step(free, record and step == steps - 1)
        if end is not None:
            free = _after(free, end)
        ends.append(free)
    return Simulated(ends, run.busy, dict(zip(run.queues, run.queue_ms, strict=True)), run.intervals)


def _after(ended: Sequence[float], end: StepEnd) -> list[float]:
    """(4) Return when every worker has updated its parameters."""
    sent = np.asarray(ended) + np.asarray(end.before_ms)
    arrived = (sent[:, None] + end.delay_ms).max(axis=0)
    after: list[float] = (np.maximum(arrived, sent) + np.asarray(end.update_ms)).tolist()
    return after


class _Run:
    """Orders and costs as lists; an action is a number, twice its stage plus one for a backward, and its chunk."""

    def __init__(
        self,
        orders: Mapping[int, Sequence[Action]],
        costs: Mapping[Key, ActionCost],
        links: Mapping[Hop, LinkCost],
        slowdown: Sequence[float] = (),
    ) -> None:
        self.workers = sorted(orders)
        known = [1.0, *slowdown] if slowdown else [1.0]
        self.slowdown = [*known, *[known[-1]] * len(self.workers)]  # by the number of workers that compute
        self.last = max(action.stage for actions in orders.values() for action in actions)
        self.todo = [[(2 * a.stage + (a.kind == "B"), a.chunk) for a in orders[w]] for w in self.workers]
        count = 2 * self.last + 2
        self.chunks = 1 + max(chunk for actions in self.todo for _, chunk in actions)
        self.owner = [-1] * count
        for worker, actions in enumerate(self.todo):
            for index, _ in actions:
                self.owner[index] = worker
        used = [index for index in range(count) if self.owner[index] >= 0]
        self.total, self.compute = [0.0] * count, [0.0] * count
        self.to = [-1] * count  # the action that needs the message of this one
        self.path: list[tuple[list[tuple[int, float]], float] | None] = [None] * count
        self.queues = list(dict.fromkeys(queue for link in links.values() for queue in link.queues))
        number = {queue: index for index, queue in enumerate(self.queues)}
        for index in used:
            stage, is_backward = divmod(index, 2)
            cost = costs[stage, "B" if is_backward else "F"]
            self.total[index] = sum(cost)
            target = stage - 1 if is_backward else stage + 1
            if 0 <= target <= self.last:
                self.to[index] = 2 * target + is_backward
            link = links.get((stage, target))
            if link is not None:
                wires = [(number[queue], queue.wire_ms(link.wire_bytes)) for queue in link.queues]
                self.path[index] = wires, link.delay_ms
        self.left, self.queue_ms = [0.0] * len(self.queues), [0.0] * len(self.queues)
        self.busy = [0.0] * len(self.workers)
        self.intervals: list[Interval] = []

    def step(self, free: Sequence[float], record: bool) -> list[float]:
        """Return when each worker has done its last action, given when each may begin."""
        todo, owner, total, to, chunks = self.todo, self.owner, self.total, self.to, self.chunks
        ended = list(free)
        position = [0] * len(todo)
        there: list[float | None] = [None] * (len(owner) * chunks)  # when inputs arrive
        for begins in (0, 2 * self.last + 1):  # these have no input from another stage
            there[begins * chunks : (begins + 1) * chunks] = [0.0] * chunks
        began = list(free)
        starts: list[tuple[float, int]] = []
        # (5) Ends if nothing slows them down; all are later by ``late``, which grows while workers slow each other.
        running: list[tuple[float, int]] = []
        now = late = 0.0

        def offer(worker: int) -> None:
            """(1) Push the next action of a worker once its input's arrival is known."""
            if position[worker] < len(todo[worker]):
                index, chunk = todo[worker][position[worker]]
                arrived = there[index * chunks + chunk]
                if arrived is not None:
                    heappush(starts, (max(ended[worker], arrived), worker))

        for worker in range(len(todo)):
            offer(worker)
        while starts or running:
            slow = self.slowdown[len(running)]
            end = now + (running[0][0] + late - now) * slow if running else math.inf
            time = min(end, starts[0][0]) if starts else end
            late += (time - now) * (1 - 1 / slow)
            now = time
            if time < end:
                worker = heappop(starts)[1]
                began[worker] = time
                heappush(running, (time - late + total[todo[worker][position[worker]][0]], worker))
                continue
            worker = heappop(running)[1]
            index, chunk = todo[worker][position[worker]]
            position[worker] += 1
            ended[worker] = time
            self.busy[worker] += total[index]
            if record:
                self._record(worker, index, chunk, there[index * chunks + chunk], began[worker], time)
            target = to[index]
            if target >= 0:
                there[target * chunks + chunk] = self._arrival(index, time)
                receiver = owner[target]
                if receiver != worker and receiver >= 0:
                    actions, at = todo[receiver], position[receiver]
                    if at < len(actions) and actions[at] == (target, chunk):
                        offer(receiver)
            offer(worker)
        assert all(at == len(actions) for at, actions in zip(position, todo, strict=True)), "an order that blocks"
        return ended

    def _arrival(self, index: int, time: float) -> float:
        """(2) and (3): return when the message of an action arrives that ends at ``time``."""
        path = self.path[index]
        if path is None:
            return time
        wires, delay_ms = path
        left, arrives = self.left, time
        for queue, _ in wires:
            if left[queue] > time:
                time = left[queue]
        for queue, wire_ms in wires:
            left[queue] = time + wire_ms
            self.queue_ms[queue] += wire_ms
            if left[queue] > arrives:
                arrives = left[queue]
        return arrives + delay_ms

    def _record(self, worker: int, index: int, chunk: int, arrived: float | None, began: float, ended: float) -> None:
        stage, is_backward = divmod(index, 2)
        source = 2 * (stage + 1 if is_backward else stage - 1) + is_backward
        came = arrived if 0 <= source < len(self.path) and self.path[source] is not None else None
        action = Action(stage, "B" if is_backward else "F", chunk)
        self.intervals.append(Interval(self.workers[worker], action, came, began, ended))
