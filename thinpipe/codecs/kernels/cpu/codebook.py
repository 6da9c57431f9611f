"""The 2^b values with the least squared error, from a sample of the tensor and all of its tails.

Where values are many a sample stands for them all: 65536 values place 16 centres to about one part in a thousand of
the least squared error. Where they are few it does not, and the few are often the large ones that the error is made
of. So the 1/1024 at either end is taken whole, in the same read of the tensor that looks for NaN and infinity.

The values are then merged into some thousand groups, fine wherever good centres are dense. Centres start from the
exact optimum over fewer groups (up to 16 centres) or from the spacing that is optimal for many (as the cube root of
the density); Lloyd's steps on prefix sums finish, each a binary search per centre.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinpipe.codecs.kernels.cpu.cells import lloyd, merge, optimal_centres
from thinpipe.codecs.kernels.cpu.order import HIGHEST, LOWEST, read, sample

SAMPLE = 65536
LEAST_SAMPLE = 16384
TAIL = 1024  # one in so many values at each end is taken whole
GROUPS = 4096  # 16 for each of the most centres
GROUPS_FOR_OPTIMUM = 512
LLOYD_STEPS = 24

Floats = NDArray[np.float64]


def key_floats(keys: np.ndarray) -> NDArray[np.float32]:
    """The float32 values that keys stand for."""
    keys = np.ascontiguousarray(keys, np.int32)
    return (keys ^ ((keys >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)


def groups_of(x: np.ndarray) -> tuple[int, int, Floats, Floats]:
    """Least and greatest key of x, and rising values with weights that stand for all of its values."""
    size = min(SAMPLE, max(LEAST_SAMPLE, x.size // 64))
    while True:
        keys = sample(x, size)
        keys.sort()
        if keys.size == x.size:
            low, high, tails = int(keys[0]), int(keys[-1]), keys[:0]
            left, right = keys[0], keys[-1] + np.int32(1)
            break
        left, right = keys[keys.size // TAIL], keys[-1 - keys.size // TAIL] + np.int32(1)
        regions = np.array([[LOWEST, left], [right, HIGHEST]], np.int32)
        low, high, _, gathered = read(x, regions[:0, 0], regions, 4 * x.size // TAIL)
        if gathered is not None:
            tails = np.sort(gathered)
            break
        size *= 8  # tails so much longer than the sample's say that it was not a fair one
    middle = keys[np.searchsorted(keys, left) : np.searchsorted(keys, right)]
    start = np.searchsorted(tails, left)
    points = key_floats(np.concatenate([tails[:start], middle, tails[start:]]))
    weight = (x.size - tails.size) / middle.size
    values, weights = merge(points, start, start + middle.size, weight, GROUPS)
    return low, high, values, weights


def best_codebook(values: Floats, weights: Floats, bits: int) -> NDArray[np.float32]:
    """2^bits rising values, close to the least squared error over rising weighted values."""
    count = 1 << bits
    if values.size <= count:
        return np.append(values, np.full(count - values.size, values[-1])).astype(np.float32)
    # About the mean, or the squares below would cancel where the values are far from zero.
    center = np.average(values, weights=weights)
    points = values - center
    sums = np.zeros((3, points.size + 1))
    np.cumsum(weights, out=sums[0, 1:])
    np.cumsum(weights * points, out=sums[1, 1:])
    np.cumsum(weights * points * points, out=sums[2, 1:])
    if bits <= 4:
        edges = np.unique(np.linspace(0, points.size, GROUPS_FOR_OPTIMUM + 1).astype(np.int64))
        starts = [optimal_centres(sums, edges, count)]
    else:
        spread = ((np.arange(count) + 0.5) * points.size / count).astype(np.int64)
        starts = [points[spread], np.linspace(points[0], points[-1], count)]
    _, centres = min((lloyd(points, sums, start, LLOYD_STEPS) for start in starts), key=lambda result: result[0])
    return (centres + center).astype(np.float32)
