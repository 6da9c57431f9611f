"""Links as they are: rates and delays of messages, from the rows of the link benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinpipe.lab.bench.link.link_options import LinkBenchOptions
from thinpipe.lab.bench.link.transfers import measure
from thinpipe.lab.plan.cluster import Cluster, Machine, MachinePath
from thinpipe.lab.records.record import Row
from thinpipe.train.shaping import Queue, Shape, Shaping, link_text

_SIZES = (4_000, 40_000, 400_000)
_UNLIMITED_MBIT_PER_S = 100_000.0  # faster is not measured: it takes no time


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """What messages take in each direction between two workers: latency, and rate."""

    up_ms: float  # from worker 0
    up_mbit_per_s: float
    down_ms: float
    down_mbit_per_s: float
    loss: float = 0.0


def measure_links(
    links: Iterable[Shaping | None], *, sizes: Sequence[int] = _SIZES, budget_s: float = 0.4
) -> dict[str, LinkTimes]:
    """Return the times of each link by its text, measured in both directions at once, as pipelines use it."""
    options = LinkBenchOptions(
        links=tuple(links), sizes=tuple(sizes), device="cpu", probe_s=0.0, budget_s=budget_s, repeat=12
    )
    outcome = measure(options, lambda line: None, lambda line: None)
    assert outcome is not None
    return {
        link_text(each): _times([row for row in outcome.record.rows if row["link"] == link_text(each)])
        for each in options.links
    }


def _times(rows: Sequence[Row]) -> LinkTimes:
    def line(way: str) -> tuple[float, float]:
        row = next(row for row in rows if row["ways"] in (way, "both ways"))
        rate = row["bandwidth_mbit_per_s"]
        return row["latency_ms"] or row["p50_ms"], min(rate or _UNLIMITED_MBIT_PER_S, _UNLIMITED_MBIT_PER_S)

    (up_ms, up), (down_ms, down) = line("both, up"), line("both, down")
    return LinkTimes(up_ms=up_ms, up_mbit_per_s=up, down_ms=down_ms, down_mbit_per_s=down)


def measured_cluster(link: Shaping | None, workers: int, times: LinkTimes, **machine: Any) -> Cluster:
    """Return equal measured machines on a shaped link, whose rates and delays are as far off as those of two workers.

    With more than two workers the queues are those of ``Shaping.paths``: each worker's own, shared by its links.
    """
    shaping = link or Shaping(Shape())
    two = shaping.paths(2)
    nominal = {way: two[way].queues[0].mbit_per_s for way in ((0, 1), (1, 0))}
    found = {(0, 1): (times.up_mbit_per_s, times.up_ms), (1, 0): (times.down_mbit_per_s, times.down_ms)}
    paths = {}
    for pair, path in shaping.paths(workers).items():
        way = (0, 1) if pair[0] < pair[1] else (1, 0)
        rate, latency_ms = found[way]
        queues = [
            Queue(each.name, rate if each.mbit_per_s is None else each.mbit_per_s * rate / (nominal[way] or rate))
            for each in path.queues
        ]
        paths[pair] = MachinePath(tuple(queues), latency_ms, path.shape.loss)
    names = ["client", *(f"server-{number}" for number in range(1, workers))]
    machines = tuple(replace(Machine(name=name, kind=name), **machine) for name in names)
    return Cluster(name=f"{workers} workers, {link_text(link)}", machines=machines, links={}, measured=paths)
