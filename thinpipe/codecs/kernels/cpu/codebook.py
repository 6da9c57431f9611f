"""Scalar k-means: the codebook of 2^b values with the least squared error, from a histogram and the full tails.

    1. a small sample brackets the middle of the values, all but about a thousandth at either end
    2. one read of the tensor counts the middle in fine bins and gathers all values of the tails: the few large values
       cause much of the error. The same read checks for NaN and infinity
    3. bins and tails are merged into some thousand groups, fine wherever good centres are dense
    4. up to 16 centres start from the exact optimum (dynamic programming) over fewer groups; more centres start from
       the spacing that is optimal for many (the cube root of the density) and from even spacing, and the better
       result is used; Lloyd's algorithm on prefix sums finishes

A sample alone is not enough: 65536 values of a ReLU6 tensor place 16 centres up to 1 % above the least error.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from thinpipe.codecs.kernels.cpu.loops.count import histogram
from thinpipe.codecs.kernels.cpu.loops.kmeans import group_ends, lloyd, merge, optimal_centres
from thinpipe.codecs.kernels.cpu.order import Keys, close_up, key_floats, sample
from thinpipe.codecs.kernels.cpu.threads import parallel, shares
from thinpipe.codecs.layout import BLOCK, bucket_affine

SAMPLE = 16384
FEW = 65536  # up to this size all values are sorted instead
TAIL = 1024  # 1 / TAIL of the values at each end is gathered
BINS = 32768  # 128 per centre at 256 centres, on tensors large enough to fill them
CROWD = 64  # distinct sampled values in one bin from which the bin is split
GROUPS = 4096
GROUPS_FOR_OPTIMUM = 768
LLOYD_STEPS = 24

Floats = NDArray[np.float64]


def groups_of(x: np.ndarray) -> tuple[int, int, Floats, Floats]:
    """Return the least and greatest key of x, and ascending weighted points that represent all of its values."""
    size = SAMPLE if x.size > FEW else x.size
    while True:
        keys = sample(x, size)
        keys.sort()
        if keys.size == x.size:
            return int(keys[0]), int(keys[-1]), *merge(key_floats(keys).astype(np.float64), np.ones(x.size), GROUPS)
        middle = keys[keys.size // TAIL : keys.size - keys.size // TAIL]
        low, high, counts, tails = _read(x, middle[0], middle[-1])
        if tails is not None:
            break
        size *= 8  # tails much longer than expected: the sample was not representative
    if not np.isfinite(key_floats(np.array([low, high]))).all():
        return low, high, np.zeros(1), np.ones(1)
    values, masses = _weighted_points(middle, counts)
    del counts
    tails.sort()
    start = np.searchsorted(tails, middle[0])
    ends = key_floats(tails).astype(np.float64)
    points = np.concatenate([ends[:start], values, ends[start:]])
    weights = np.concatenate([np.ones(start), masses, np.ones(tails.size - start)])
    return low, high, *merge(points, weights, GROUPS)


def _read(x: np.ndarray, left: np.int32, right: np.int32) -> tuple[int, int, NDArray[np.int64], Keys | None]:
    """Return the least and greatest key, the counts in bins between two keys, and the tail keys (None: too many)."""
    parts = shares(x)
    bins = min(BINS, max(2048, x.size // 64))
    counts = np.zeros((len(parts), 2, bins + 1), np.uint32)
    gathered = np.empty((len(parts), 4 * x.size // TAIL + BLOCK), np.int32)
    p, offset, scale = _binning(left, right, bins)
    results = parallel(
        lambda i, first, last: histogram(x, first, last, left, right, p, offset, scale, counts[i], gathered[i]),
        [(i, *part) for i, part in enumerate(parts)],
    )
    low, high = min(low for low, _, _ in results), max(high for _, high, _ in results)
    tails = close_up(gathered, [found for _, _, found in results])
    return low, high, counts[..., :bins].sum(axis=(0, 1), dtype=np.int64), tails


def _binning(left: np.int32, right: np.int32, bins: int) -> tuple[np.float32, np.float32, np.float32]:
    lo, hi = torch.from_numpy(key_floats(np.array([left, right])))
    p, offset, scale = bucket_affine(lo, hi, bins)
    return np.float32(p), np.float32(offset), np.float32(scale)


def _weighted_points(middle: Keys, counts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return ascending weighted points for the counts of bins.

    A bin is represented by the mean of its sampled values, so that a frequent value is exact. A bin with CROWD
    distinct values or more is represented by all of its sampled values, with equal parts of its count, because the best
    codebook may have several values there.
    """
    floats, bins = key_floats(middle), counts.size
    p, offset, scale = _binning(middle[0], middle[-1], bins)
    bin_of = np.minimum((floats * p - offset) * scale, np.float32(bins - 1)).astype(np.int64)
    left, right = float(floats[0]), float(floats[-1])
    half = (right - left) / (2 * bins)
    values = np.linspace(left + half, right - half, bins)
    population = np.bincount(bin_of, minlength=bins)
    # In place, here and below: arrays over all bins are most of the memory of encoding.
    np.divide(np.bincount(bin_of, weights=floats, minlength=bins), population, out=values, where=population > 0)
    crowded = np.bincount(bin_of[1:][floats[1:] > floats[:-1]], minlength=bins) >= CROWD
    np.copyto(population, counts > 0, where=~crowded)  # points of each bin, from here on
    points = np.repeat(values, population)
    points[np.repeat(crowded, population)] = floats[crowded[bin_of]]
    np.divide(counts, population, out=values, where=population > 0)
    return points, np.repeat(values, population)


def best_codebook(values: Floats, weights: Floats, bits: int) -> NDArray[np.float32]:
    """Return 2^bits ascending values, close to the least squared error over ascending weighted values."""
    count = 1 << bits
    if values.size <= count:
        return np.append(values, np.full(count - values.size, values[-1])).astype(np.float32)
    # Centred, because the squares below would cancel if the values were far from zero.
    center = np.average(values, weights=weights)
    points = values - center
    sums = np.zeros((3, points.size + 1))
    np.cumsum(weights, out=sums[0, 1:])
    np.cumsum(weights * points, out=sums[1, 1:])
    np.cumsum(weights * points * points, out=sums[2, 1:])
    if bits <= 4:
        edges = np.append(0, group_ends(points, weights, GROUPS_FOR_OPTIMUM))
        starts = [optimal_centres(sums, edges, count)]
    else:
        spread = ((np.arange(count) + 0.5) * points.size / count).astype(np.int64)
        starts = [points[spread], np.linspace(points[0], points[-1], count)]
    _, centres = min((lloyd(points, sums, start, LLOYD_STEPS) for start in starts), key=lambda result: result[0])
    return (centres + center).astype(np.float32)
