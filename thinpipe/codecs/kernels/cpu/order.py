"""Exact order statistics without sorting: a sample brackets them, one read counts and gathers the bracketed keys.

    1. a sorted sample of m values gives two keys between which each wanted rank almost certainly lies
    2. one read of the tensor counts the keys below every bracket's ends and gathers the few keys inside
    3. the counts turn each rank of the tensor into a rank of the gathered keys: the same problem, much smaller

Many equal values (half of a ReLU's output is 0) are never gathered: if the sample has a bracket's end more than once,
that key becomes a bracket of its own, which only needs counting. If a count shows a rank beyond its bracket, which
happens for about one in a hundred to a thousand tensors, the brackets are widened and the tensor is read again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinpipe.codecs.kernels.cpu.loops.count import count_and_gather, extent_of_blocks, sample_keys
from thinpipe.codecs.kernels.cpu.threads import parallel, shares, split
from thinpipe.codecs.layout import BLOCK

Keys = NDArray[np.int32]

SMALL = 8192  # up to this size sorting costs less than sampling
DEVIATIONS = 3.5  # half a bracket's width, in standard deviations of a rank in the sample
RANKS_PER_READ = 16  # brackets of more ranks would hold too much of the tensor in memory

LOWEST, HIGHEST = np.int32(-0x80000000), np.int32(0x7FFFFFFF)


def key_floats(keys: np.ndarray) -> NDArray[np.float32]:
    """Return the float32 values of keys."""
    keys = np.ascontiguousarray(keys, np.int32)
    return (keys ^ ((keys >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)


def extent(x: np.ndarray) -> tuple[int, int]:
    """Return the least and the greatest key of x."""
    parts = parallel(lambda first, last: extent_of_blocks(x, first, last), shares(x))
    return min(low for low, _ in parts), max(high for _, high in parts)


def sample(x: np.ndarray, size: int, magnitude: bool = False) -> Keys:
    """Return keys from random positions, one in each of ``size`` equal stretches; deterministic. All if x is small."""
    stride = x.size // size if size else 1
    if stride <= 1:
        size, stride = x.size, 1
    keys = np.empty(size, np.int32)
    parallel(lambda first, last: sample_keys(x, first, last, stride, magnitude, keys), split(size, 65536))
    return keys


def read(
    x: np.ndarray, bounds: Keys, regions: Keys, expected: int, magnitude: bool = False
) -> tuple[int, int, NDArray[np.int64], Keys | None]:
    """Read x once; return the least key, the greatest key, counts below the bounds, and the keys in the regions.

    Returns None for the keys if they are far more than expected. If most of them are in one thread's share, as in a
    sorted tensor, the read is repeated with buffers large enough for all keys in every share.
    """
    parts = shares(x)
    for capacity in (expected // len(parts) * 5 // 4 + BLOCK, 2 * expected + BLOCK):
        gathered = np.empty((len(parts), capacity), np.int32)
        below = np.zeros((len(parts), len(bounds)), np.int64)
        results = parallel(
            lambda i, first, last, below, gathered: count_and_gather(
                x, first, last, magnitude, bounds, regions, below[i], gathered[i]
            ),
            [(i, *part, below, gathered) for i, part in enumerate(parts)],
        )
        kept = close_up(gathered, [found for _, _, found in results])
        if kept is not None:
            break
    low, high = min(low for low, _, _ in results), max(high for _, high, _ in results)
    return low, high, below.sum(axis=0), kept


def close_up(gathered: Keys, found: list[int]) -> Keys | None:
    """Concatenate the first ``found`` keys of every row in place; return None if a row overflowed."""
    if min(found) < 0:
        return None
    flat, total = gathered.reshape(-1), 0
    for row, count in zip(gathered, found, strict=True):
        flat[total : total + count] = row[:count]
        total += count
    return flat[:total]


def order_statistics(x: np.ndarray, ranks: NDArray[np.int64], magnitude: bool = False) -> tuple[int, int, Keys]:
    """Return the least key, the greatest, and those at ascending ranks (0 is the least) of x or its magnitudes."""
    if x.size <= SMALL:
        drawn = np.sort(sample(x, x.size, magnitude))
        return int(drawn[0]), int(drawn[-1]), drawn[ranks]
    if len(ranks) > RANKS_PER_READ:
        halves = np.array_split(ranks, 2)
        low, high, head = order_statistics(x, halves[0], magnitude)
        return low, high, np.concatenate([head, order_statistics(x, halves[1], magnitude)[2]])
    # Sampling costs O(m) for a sample of m, gathering O(n * ranks / sqrt(m)): the sum is least near this m.
    drawn = sample(x, int((x.size * len(ranks)) ** (2 / 3)) // 3, magnitude)
    width = DEVIATIONS
    while True:
        bounds, regions, share = _brackets(drawn, ranks / x.size, width)
        low, high, below, gathered = read(x, bounds, regions, int(share * x.size), magnitude)
        found = None if gathered is None else _resolve(x.size, ranks, bounds, regions, below, gathered)
        if found is not None:
            return low, high, found
        width *= 2


def _brackets(drawn: Keys, quantiles: NDArray[np.float64], width: float) -> tuple[Keys, Keys, float]:
    """Return bounds to count below, regions between bounds to gather, and the share of the sample in the regions."""
    size = len(drawn)
    deviation = np.sqrt(size * quantiles * (1 - quantiles)) * width + 2
    ends = _merged(np.floor(quantiles * size - deviation), np.ceil(quantiles * size + deviation))
    needed = np.clip([place for i, j in ends for place in (i, i + 1, j - 1, j)], 0, size - 1)
    drawn = np.partition(drawn, needed)
    bounds: list[int] = []
    regions: list[tuple[int, int]] = []
    share = 0
    for i, j in ends:
        start = int(drawn[i]) if i >= 0 else int(LOWEST)
        stop = int(drawn[j]) if j < size else int(HIGHEST)
        bounds += [start, stop]
        if j < size and drawn[j - 1] == stop:
            bounds.append(stop + 1)
        if i >= 0 and drawn[i + 1] == start:
            start += 1
            bounds.append(start)
        if stop > start:
            regions.append((start, stop))
            share += min(j, size) - max(i, 0)
    return np.unique(np.array(bounds, np.int32)), np.array(regions, np.int32).reshape(-1, 2), share / size


def _merged(first: NDArray[np.float64], last: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Merge overlapping brackets of sample ranks."""
    merged: list[tuple[int, int]] = []
    for i, j in zip(map(int, first), map(int, last), strict=True):
        if merged and i <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(j, merged[-1][1]))
        else:
            merged.append((i, j))
    return merged


def _resolve(
    count: int, ranks: NDArray[np.int64], bounds: Keys, regions: Keys, below: NDArray[np.int64], gathered: Keys
) -> Keys | None:
    """Return the keys at the ranks from the counts and the gathered keys; None if a rank is in no bracket."""
    stretch = np.searchsorted(below, ranks, side="right") - 1  # bounds[i] <= the key at this rank < bounds[i + 1]
    if (stretch < 0).any():
        return None
    start = bounds[stretch].astype(np.int64)
    ends = np.append(bounds.astype(np.int64), int(HIGHEST))
    single = ends[stretch + 1] == start + 1
    in_region = np.isin(start, regions[:, 0])
    if not (single | in_region).all():
        return None
    found = bounds[stretch].copy()
    inner = in_region & ~single
    if inner.any():
        sizes = np.append(below, count)
        region_starts = np.searchsorted(bounds, regions[:, 0])
        region_sizes = sizes[region_starts + 1] - sizes[region_starts]
        before = np.concatenate([[0], np.cumsum(region_sizes)])
        which = np.searchsorted(regions[:, 0], start[inner])
        inner_ranks = ranks[inner] - below[stretch[inner]] + before[which]
        if gathered.size > count // 2:  # brackets that exclude so little might recurse forever
            found[inner] = np.partition(gathered, inner_ranks)[inner_ranks]
        else:
            found[inner] = order_statistics(gathered, inner_ranks)[2]
    return found
