"""The choice of bits per value for every link of a pipeline: pure functions of measured times.

A message of b bytes on an idle link takes ``offset_s + b * s_per_byte`` from the clock of its sender to that of its
receiver: the delay, the difference of the clocks, and the transmission. Messages of two sizes give both numbers,
without synchronized clocks and at any load of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple

LEAST_SAMPLES = 2  # of a size: the quickest counts, since other work on a machine only delays messages
LEAST_RATIO = 1.15  # between two sizes: below, the noise of clocks exceeds the difference
# A level is taken if the step is predicted to be at most this many times as long as with the fewest bits. The second
# limit is for levels in use: without the difference, noise would change the level again and again.
RISES, STAYS = 1.03, 1.05

Sample = tuple[int, float]  # bytes, seconds


class Transfer(NamedTuple):
    """The time that a message takes, as a linear function of its bytes."""

    offset_s: float
    s_per_byte: float


def fit_transfer(samples: Sequence[Sample]) -> Transfer | None:
    """Return the line through the quickest small and the quickest large message; None if sizes do not differ."""
    sizes = [size for size, _ in samples]
    middle = (min(sizes, default=0) + max(sizes, default=0)) / 2
    small = [sample for sample in samples if sample[0] <= middle]
    large = [sample for sample in samples if sample[0] > middle]
    if min(len(small), len(large)) < LEAST_SAMPLES:
        return None
    (small_size, small_s), (large_size, large_s) = (min(each, key=itemgetter(1)) for each in (small, large))
    if large_size < LEAST_RATIO * small_size:
        return None
    s_per_byte = max(0.0, (large_s - small_s) / (large_size - small_size))
    return Transfer(small_s - s_per_byte * small_size, s_per_byte)


def follow_transfer(known: Transfer | None, samples: Sequence[Sample], least_s: float = inf) -> Transfer | None:
    """Return the transfer times that follow from samples, with the known offset if these have one size only.

    ``least_s``: the time of the quickest message of late. An offset cannot exceed it: small messages were delayed then.
    """
    found = fit_transfer(samples)
    line = found or known
    if line is None or not samples or (found is not None and found.offset_s <= least_s):
        return line
    offset_s = min(line.offset_s, least_s)
    return Transfer(offset_s, max(0.0, min((seconds - offset_s) / size for size, seconds in samples)))


def choose_levels(
    step_ms: Callable[[Sequence[int]], float], current: Sequence[int], counts: Sequence[int]
) -> tuple[int, ...]:
    """Return the level of each link: the most bits with which a step is not notably longer than with the fewest.

    Levels are numbered from 0, the most bits, and there are ``counts`` of them. ``step_ms``: the duration of a step
    with these levels.
    """
    chosen = [count - 1 for count in counts]
    least = step_ms(chosen)
    for link, (now, fewest) in enumerate(zip(current, tuple(chosen), strict=True)):
        for level in range(fewest):
            chosen[link] = level
            if step_ms(chosen) <= least * (STAYS if level >= now else RISES):
                break
        else:
            chosen[link] = fewest
    return tuple(chosen)
