"""What a run's training steps cost: sums over its links and its workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from thinpipe.engines.engine import Engine
from thinpipe.measure.meter import peak_bytes
from thinpipe.pipeline.links.counters import STAMPS
from thinpipe.training.events import LinkUse, WorkerUse


class Usage:
    """Counts on every worker; ``collect`` and ``workers`` are collectives."""

    def __init__(self, engine: Engine, *, forward: str, backward: str, messages_per_step: int) -> None:
        self._engine = engine
        self._specs = {"forward": forward, "backward": backward}
        self._links: dict[tuple[int, int], LinkUse] = {}
        self._steps_ms = self._elsewhere_ms = 0.0
        # Links remember the stamps of so many messages; without them waiting cannot be told from transfer.
        self._collect_every = max(1, STAMPS // max(messages_per_step, 1))
        self._uncollected = 0

    def step(self, *, seconds: float, waited_s: float) -> None:
        """One step is done; of its time, so much was waiting for other workers to end theirs."""
        self._steps_ms += (seconds - waited_s) * 1e3
        self._uncollected += 1
        if self._uncollected == self._collect_every:
            self.collect()

    def collect(self) -> None:
        reports, elsewhere_ms = self._engine.collect_links()
        self._elsewhere_ms += elsewhere_ms
        self._uncollected = 0
        for report in reports:
            ends = report.source, report.target
            self._links[ends] = self._links.get(ends, self._unused(*ends)).plus(report)

    def links(self) -> tuple[LinkUse, ...]:
        return tuple(self._links.values())

    def workers(self) -> tuple[WorkerUse, ...]:
        engine = self._engine
        peak_mib = (peak_bytes(engine.world.device) or 0) / 2**20
        mine = [sorted(engine.stages), self._steps_ms - self._elsewhere_ms, peak_mib]
        return tuple(
            WorkerUse(worker=worker, stages=tuple(stages), compute_ms=compute_ms, peak_mib=peak)
            for worker, (stages, compute_ms, peak) in enumerate(engine.world.gather(mine))
        )

    def _unused(self, source: int, target: int) -> LinkUse:
        direction: Literal["forward", "backward"] = "forward" if target > source else "backward"
        return LinkUse(source=source, target=target, direction=direction, spec=self._specs[direction])


def messages_per_step(shapes: Iterable[tuple[tuple[int, ...], ...]], chunks: int) -> int:
    """Of the busiest link, given the shapes of a chunk on each."""
    return chunks * max((len(each) for each in shapes), default=0)
