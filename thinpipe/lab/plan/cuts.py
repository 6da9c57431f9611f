"""Cuts for machines of different speeds: the busiest worker or link is as little busy as possible.

Dynamic programming over the stages: the best way to give units up to ``end`` to the first stages extends the best way
to give those up to ``start`` to one stage fewer by the units between them. ``pipeline.partition.balance`` has equal
workers, and minimizes bytes as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
_ENDS_TRIED = 12  # units that the client has at either end, at most, unless it has to have more


def stage_times(units_ms: Sequence[float], state_bytes: Sequence[float], most_bytes: float) -> Times:
    """Return the time of a stage of units ``start`` (row) to ``end`` (column); infinite if empty or too large."""
    totals, held = np.concatenate([[0.0], np.cumsum(units_ms)]), np.concatenate([[0.0], np.cumsum(state_bytes)])
    times = totals[None, :] - totals[:, None]
    possible = np.triu(np.ones_like(times, bool), 1) & (held[None, :] - held[:, None] <= most_bytes)
    return np.where(possible, times, np.inf)


def linear_cuts(stages: Sequence[Times], links: Sequence[Times]) -> tuple[int, ...] | None:
    """Return the cuts of a line of stages; ``links`` are the times of a cut on the link behind each stage."""
    best, parents = _prefixes(stages, links, 0)
    end = len(stages[0]) - 1
    return None if np.isinf(best[end]) else _cuts(parents, end)


def client_server_cuts(
    client_ms: Sequence[float],
    client_times: Times,
    servers: Sequence[Times],
    links: Sequence[Times],
    least: tuple[int, int] = (1, 1),
) -> tuple[int, ...] | None:
    """Return the cuts of a client with both ends and servers between; ``least``: units of the client at both ends."""
    units = len(client_ms)
    totals = np.concatenate([[0.0], np.cumsum(client_ms)])
    found, chosen = np.inf, None
    for first in range(least[0], min(least[0] + _ENDS_TRIED, units - least[1])):
        best, parents = _prefixes(servers, links[1:-1], first)
        for last in range(max(first + len(servers), units - least[1] - _ENDS_TRIED), units - least[1] + 1):
            client = totals[first] + totals[units] - totals[last]
            held = client_times[0, first] + client_times[last, units]  # infinite if it does not fit
            slowest = max(best[last], client, links[0][first], links[-1][last]) if held < np.inf else np.inf
            if slowest < found:
                found, chosen = slowest, (first, last, parents)
    return None if chosen is None else (chosen[0], *_cuts(chosen[2], chosen[1]), chosen[1])


def _prefixes(stages: Sequence[Times], links: Sequence[Times], start: int) -> tuple[Times, list[NDArray[np.int64]]]:
    """Return the time of the busiest part if the stages have units ``start`` to each end, and where each begins."""
    best = stages[0][start]
    parents: list[NDArray[np.int64]] = []
    for times, link in zip(stages[1:], links, strict=True):
        slowest = np.maximum(np.maximum(best, link)[:, None], times)  # by cut before the stage, and its end
        parents.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    return best, parents


def _cuts(parents: Sequence[NDArray[np.int64]], end: int) -> tuple[int, ...]:
    cuts: list[int] = []
    for starts in reversed(parents):
        end = int(starts[end])
        cuts.insert(0, end)
    return tuple(cuts)
