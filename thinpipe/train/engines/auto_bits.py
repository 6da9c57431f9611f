"""Adaptive bits: while a run trains, worker 0 chooses the bits per value of every link (``--compress auto:2-8``).

    every step       (1) each worker sends what it measured, with the statistics of the step (``step``)
                     (2) worker 0 sends the levels of the next steps with them, so all switch before the same step
    some steps       (3) the first chunk has another level: messages of two sizes give the rate of a link
    every N steps    (4) worker 0 chooses levels; also after two steps that took much longer, or shorter, than before
    after (4)        (5) more bits stay only if steps take as long as before; else they are tried again later, each
                         time after a pause twice as long, unless links have become faster

The duration of a step with other levels is simulated from the measured rates and computing times (``level_choice``,
``simulator``). What was measured is not saved: a resumed run continues with the saved levels and measures again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from statistics import median

from thinpipe.pipeline.order import make_order
from thinpipe.train.engines.engine import Engine, SharedNumbers
from thinpipe.train.engines.level_choice import LEAST_RATIO, Sample, Transfer, choose_levels, follow_transfer
from thinpipe.train.engines.pipeline import PipelineEngine
from thinpipe.train.engines.plan import LinkPlan
from thinpipe.train.engines.simulator import ActionCost, Hop, Key, LinkCost, simulate
from thinpipe.train.shaping import Queue

OTHER = 1.5  # ratio of step times that is a change of the link
RECENT = 2  # steps that have changed
REMEMBERED = 5  # intervals: longer ones would add the drift of clocks
LEAST_STEPS = 3  # whose median is the usual duration
WORSE = 1.06  # ratio of step times at which more bits are taken back
LONGEST_PAUSE = 8  # intervals until they are tried again
FASTER = 3.0  # ratio of rates that ends the pause: errors of measurement are smaller
PROBES = 4  # parts of the interval, after each of which but the last the first chunk has another level


class AutoBits(SharedNumbers):
    """The levels of all links whose bits are chosen in training, and what worker 0 has measured of the pipeline."""

    def __init__(self, engine: PipelineEngine, every: int, accumulate: int = 1, levels: Sequence[int] = ()) -> None:
        self.engine, self.every, self._accumulate = engine, every, accumulate
        self.plans = adaptive_links(engine.link_plans())
        self.hops = [(plan.source, plan.target) for plan in self.plans]
        most = [plan.levels[0] for plan in self.plans]
        self.levels = list(levels) if len(levels) == len(most) else most  # otherwise they were saved for other cuts
        self.count = 3 * len(self.hops) + 2 * engine.stage_count  # numbers that workers exchange in a step
        self._step = 0
        self._transfers: list[Transfer | None] = [None] * len(self.hops)
        self._least_s = [deque[float](maxlen=REMEMBERED) for _ in self.hops]  # of the messages of an interval
        self._totals: dict[int, tuple[float, float]] = {}  # ms of forwards and backwards so far, by stage
        for link in engine.links:
            link.times_first = (link.source, link.target) in self.hops
        self._usual_s: float | None = None  # duration of a step with these levels, as measured earlier
        self._before: tuple[list[int], float] | None = None  # levels and duration of a step before a trial of more bits
        self._pause = 1  # intervals after the next failed trial
        self._barred = 0  # the step from which on more bits may be tried
        self._failed: list[Transfer | None] = []  # times of messages in the last failed trial
        self._forget()

    def _forget(self) -> None:
        """Begin to measure again."""
        self._samples: list[list[Sample]] = [[] for _ in self.hops]
        self._seconds: list[float] = []  # of steps
        self._compute_ms: list[list[float]] = []  # by step: forwards and backwards of every stage

    def begin(self, step: int) -> None:
        """Set the levels of a step at this worker's links, (3)."""
        self._step, position = step, step % self.every
        probes = position in {self.every * part // PROBES for part in range(1, PROBES)}
        first = [_other(plan, level) if probes else level for plan, level in zip(self.plans, self.levels, strict=True)]
        self.engine.set_levels(dict(zip(self.hops, zip(self.levels, first, strict=True), strict=True)))

    # (1), (2)

    def numbers(self) -> list[float]:
        """Return the numbers of this worker in the step that it has computed; the sum over workers is meaningful."""
        times, sizes = [0.0] * len(self.hops), [0.0] * len(self.hops)
        for link in self.engine.links:
            found = link.first_times() if link.times_first else None
            if found is not None:
                index = self.hops.index((link.source, link.target))
                times[index] = -found[0] if link.route.sends else found[0]
                sizes[index] = 0.0 if link.route.sends else found[1]
        compute_ms = [0.0] * (2 * self.engine.stage_count)
        for stage, total in self.engine.computed_ms().items():
            before = self._totals.get(stage, (0.0, 0.0))
            if sum(total) < sum(before):  # the clocks were reset
                before = (0.0, 0.0)
            compute_ms[2 * stage : 2 * stage + 2] = [total[0] - before[0], total[1] - before[1]]
            self._totals[stage] = total
        levels = self.next_levels() if self.engine.world.is_client else [0] * len(self.hops)
        return [*times, *sizes, *compute_ms, *levels]

    def receive(self, sums: Sequence[float], seconds: float) -> bool:
        """Take the sums over all workers in a step of this duration; return True if the next one has other levels."""
        count = len(self.hops)
        if self.engine.world.is_client:
            for samples, time, size in zip(self._samples, sums[:count], sums[count : 2 * count], strict=True):
                if size:
                    samples.append((int(size), time))
            self._seconds.append(seconds)
            self._compute_ms.append(list(sums[2 * count : -count]))
        before, self.levels = self.levels, [int(level) for level in sums[-count:]]
        return self.levels != before

    # (4) and (5), on worker 0

    def next_levels(self) -> list[int]:
        """Return the levels of the steps after this one."""
        if self._before is not None and len(self._seconds) > RECENT:
            (levels, usual_s), self._before = self._before, None
            if min(self._seconds[-RECENT:]) > WORSE * usual_s:
                self._barred, self._failed = self._step + self._pause * self.every, list(self._transfers)
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                self._usual_s = usual_s
                self._forget()
                return levels
        if len(self._seconds) <= RECENT:
            return self.levels
        is_due, has_changed = self._step % self.every == 0, self._has_changed()
        if not (is_due or has_changed):
            return self.levels
        recent = len(self._seconds) if is_due else RECENT
        for index, samples in enumerate(self._samples):
            least_s = self._least_s[index]
            least_s += [min(seconds for _, seconds in samples)] if is_due and samples else []
            known = self._transfers[index]
            self._transfers[index] = follow_transfer(known, samples[-recent:], min(least_s, default=inf))
        levels = self._choose(recent)
        if has_changed or self._is_faster():
            self._barred, self._pause = 0, 1
        if self._step < self._barred:
            levels = list(map(min, levels, self.levels))
        if any(new > old for new, old in zip(levels, self.levels, strict=True)):
            self._before = self.levels, median(self._seconds[-recent:])
        if is_due or levels != self.levels:
            self._usual_s = median(self._seconds) if levels == self.levels else None
            self._forget()
        return levels

    def _is_faster(self) -> bool:
        """Return True if a link has become much faster since the last failed trial."""
        pairs = zip(self._transfers, self._failed, strict=False)
        return any(now and then and FASTER * now.s_per_byte < then.s_per_byte for now, then in pairs)

    def _has_changed(self) -> bool:
        *before, one, two = self._seconds
        usual = median(before) if len(before) >= LEAST_STEPS else self._usual_s
        return usual is not None and (min(one, two) > OTHER * usual or max(one, two) < usual / OTHER)

    def _choose(self, recent: int) -> list[int]:
        """Return the levels for the rates of links and the duration of the last ``recent`` steps."""
        transfers = [each for each in self._transfers if each is not None]
        if len(transfers) < len(self.hops):
            return self.levels
        engine, chunks = self.engine, self.engine.chunks
        placement = [worker for _, worker in sorted((each.stage, each.worker) for each in engine.holdings)]
        orders = make_order(engine.order, placement, chunks)
        compute = [median(each) / chunks / self._accumulate for each in zip(*self._compute_ms, strict=True)]
        costs: dict[Key, ActionCost] = {}
        for stage in range(engine.stage_count):
            costs[stage, "F"], costs[stage, "B"] = map(ActionCost, compute[2 * stage : 2 * stage + 2])
        paths = _paths(self.plans, transfers)

        def simulated_ms(levels: Sequence[int]) -> float:
            links = {
                hop: LinkCost((queue,), plan.level_bytes[level], delay_ms)
                for hop, plan, level, (queue, delay_ms) in zip(self.hops, self.plans, levels, paths, strict=True)
            }
            return self._accumulate * simulate(orders, costs, links).step_ms

        current = [plan.levels.index(level) for plan, level in zip(self.plans, self.levels, strict=True)]
        rest_ms = max(0.0, 1e3 * median(self._seconds[-recent:]) - simulated_ms(current))  # the update, for example
        chosen = choose_levels(
            lambda levels: simulated_ms(levels) + rest_ms, current, [len(plan.levels) for plan in self.plans]
        )
        return [plan.levels[index] for plan, index in zip(self.plans, chosen, strict=True)]


def adaptive_links(plans: Sequence[LinkPlan]) -> list[LinkPlan]:
    """Return the plans of links whose bits are chosen in training: those where fewer bits make messages smaller."""
    between = [plan for plan in plans if plan.levels and plan.source_worker != plan.target_worker]
    return [plan for plan in between if plan.level_bytes[0] >= LEAST_RATIO * plan.level_bytes[-1]]


def set_saved_levels(engine: Engine, levels: Sequence[int]) -> None:
    """Set the levels with which a run was saved, unless it had other links."""
    plans = adaptive_links(engine.link_plans())
    if len(plans) == len(levels):
        engine.set_levels({(p.source, p.target): (each, each) for p, each in zip(plans, levels, strict=True)})


def _other(plan: LinkPlan, level: int) -> int:
    """Return the next level of more bits whose messages are larger; if there is none, of fewer bits and smaller."""
    size = dict(zip(plan.levels, plan.level_bytes, strict=True))
    more = [each for each in plan.levels if size[each] >= LEAST_RATIO * size[level]]
    fewer = [each for each in plan.levels if LEAST_RATIO * size[each] <= size[level]]
    return more[-1] if more else fewer[0] if fewer else level


def _paths(plans: Sequence[LinkPlan], transfers: Sequence[Transfer]) -> list[tuple[Queue, float]]:
    """Return the queue and the delay in ms of every link; links from one worker to another share a queue."""
    quickest: dict[Hop, Transfer] = {}
    for plan, transfer in zip(plans, transfers, strict=True):
        pair = plan.source_worker, plan.target_worker
        quickest[pair] = min(quickest.get(pair, transfer), transfer, key=lambda each: each.s_per_byte)

    def path(pair: Hop) -> tuple[Queue, float]:
        rate, back = quickest[pair].s_per_byte, quickest.get((pair[1], pair[0]))
        # The difference of the clocks cancels in the sum of both directions.
        delay_s = 0.0 if back is None else max(0.0, (quickest[pair].offset_s + back.offset_s) / 2)
        return Queue(f"{pair[0]} to {pair[1]}", 8e-6 / rate if rate else None), 1e3 * delay_s

    return [path((plan.source_worker, plan.target_worker)) for plan in plans]
