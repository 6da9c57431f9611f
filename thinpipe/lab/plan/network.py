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

_SMALL, _MESSAGES = 4_000, 12  # bytes, and how many of them
_UNLIMITED_MBIT_PER_S = 100_000.0  # faster is not measured: it takes no time


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """The latency and the rate of messages in each direction between two workers."""

    up_ms: float  # from worker 0
    up_mbit_per_s: float
    down_ms: float
    down_mbit_per_s: float
    loss: float = 0.0


def measure_links(links: Iterable[Shaping | None], *, probe_s: float = 0.4) -> dict[str, LinkTimes]:
    """Return the times of each link by its text: the rate of a stream, and the latency of a small message."""
    options = LinkBenchOptions(
        links=tuple(links), sizes=(_SMALL,), device="cpu", probe_s=probe_s, budget_s=probe_s, repeat=_MESSAGES
    )
    outcome = measure(options, _ignore, _ignore)
    assert outcome is not None
    return {
        link_text(each): _times([row for row in outcome.record.rows if row["link"] == link_text(each)])
        for each in options.links
    }


def _ignore(line: str) -> None:
    """Print nothing; workers receive this function."""


def _times(rows: Sequence[Row]) -> LinkTimes:
    probed = rows[0]
    up, down = (min(probed[f"{way}_mbit_per_s"], _UNLIMITED_MBIT_PER_S) for way in ("up", "down"))

    def latency_ms(way: str, rate: float) -> float:
        row = next(row for row in rows if row["ways"] in (way, "both ways"))
        return max(row["p50_ms"] - Queue("", rate).wire_ms(row["wire_bytes"]), 0.0)

    loss = max(probed["loss_up"] or 0.0, probed["loss_down"] or 0.0)
    return LinkTimes(
        up_ms=latency_ms("both, up", up),
        up_mbit_per_s=up,
        down_ms=latency_ms("both, down", down),
        down_mbit_per_s=down,
        loss=loss,
    )


def measured_cluster(
    link: Shaping | None, workers: int, times: LinkTimes, *, slowdown: Sequence[float] = (), **machine: Any
) -> Cluster:
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
        paths[pair] = MachinePath(tuple(queues), latency_ms, times.loss)
    names = ["client", *(f"server-{number}" for number in range(1, workers))]
    machines = tuple(replace(Machine(name=name, kind=name), **machine) for name in names)
    name = f"{workers} workers, {link_text(link)}"
    return Cluster(name=name, machines=machines, links={}, measured=paths, slowdown=slowdown)
