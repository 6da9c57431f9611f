"""The 2^b values with the least squared error, from a sample of the tensor and all of its tails.

Where values are many a sample stands for them all: 65536 values place 16 centres to about one part in a thousand of
the least squared error. Where they are few it does not, and the few are often the large ones that the error is made
of. So the 1/1024 at either end is taken whole, in the same read of the tensor that looks for NaN and infinity.

Centres start from the exact optimum over some hundred groups of values (up to 16 centres) or from the spacing that is
optimal for many (the density's cube root); Lloyd's steps on prefix sums finish, each a binary search per centre.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thinpipe.codecs.kernels.cpu.cells import lloyd, optimal_centres
from thinpipe.codecs.kernels.cpu.order import HIGHEST, LOWEST, read, sample

SAMPLE = 65536
TAIL = 1024  # one in so many values at each end is taken whole
GROUPS = 768
LLOYD_STEPS = 24

Floats = NDArray[np.float64]


def key_floats(keys: np.ndarray) -> NDArray[np.float32]:
    """The float32 values that keys stand for."""
    keys = np.ascontiguousarray(keys, np.int32)
    return (keys ^ ((keys >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)


def weighted_points(x: np.ndarray) -> tuple[int, int, Floats, Floats]:
    """Least and greatest key of x, and rising values with weights that stand for it."""
    size = SAMPLE
    while True:
        keys = np.sort(sample(x, size))
        if keys.size == x.size:
            return int(keys[0]), int(keys[-1]), key_floats(keys).astype(np.float64), np.ones(x.size)
        left, right = keys[keys.size // TAIL], keys[-1 - keys.size // TAIL] + np.int32(1)
        regions = np.array([[LOWEST, left], [right, HIGHEST]], np.int32)
        low, high, _, tails = read(x, regions[:, 0].copy(), regions, 4 * x.size // TAIL)
        if tails is not None:
            break
        size *= 8  # tails so much longer than the sample's say that it was not a fair one
    tails = np.sort(tails)
    cut = np.searchsorted(tails, left)
    middle = keys[np.searchsorted(keys, left) : np.searchsorted(keys, right)]
    weights = np.ones(tails.size + middle.size)
    weights[cut : cut + middle.size] = (x.size - tails.size) / middle.size
    return low, high, key_floats(np.concatenate([tails[:cut], middle, tails[cut:]])).astype(np.float64), weights


def best_codebook(points: Floats, weights: Floats, bits: int) -> NDArray[np.float32]:
    """2^bits rising values, close to the least squared error over rising weighted points."""
    count = 1 << bits
    distinct = points[np.append(True, points[1:] != points[:-1])]
    if distinct.size <= count:
        return np.append(distinct, np.full(count - distinct.size, distinct[-1])).astype(np.float32)
    # About the mean, or the squares below would cancel where the values are far from zero.
    center = np.average(points, weights=weights)
    points = points - center
    sums = np.zeros((3, points.size + 1))
    np.cumsum(weights, out=sums[0, 1:])
    np.cumsum(weights * points, out=sums[1, 1:])
    np.cumsum(weights * points * points, out=sums[2, 1:])
    companded = _companded(points, sums[0])
    if bits <= 4:
        edges = np.unique(companded(np.arange(GROUPS + 1) / GROUPS))
        edges[0], edges[-1] = 0, points.size
        starts = [optimal_centres(sums, edges, count)]
    else:
        spread = companded((np.arange(count) + 0.5) / count)
        starts = [points[np.minimum(spread, points.size - 1)], np.linspace(points[0], points[-1], count)]
    finished = [lloyd(points, sums, start, LLOYD_STEPS) for start in starts]
    _, centres = min(finished, key=lambda result: result[0])
    return (centres + center).astype(np.float32)


def _companded(points: Floats, mass: Floats) -> Callable[[Floats], NDArray[np.int64]]:
    """A function from 0..1 to indices of points, with as many indices in any stretch as good centres there.

    A stretch of given mass and width wants mass^(1/3) * width^(2/3) of the centres (Panter and Dite).
    """
    grid = np.append(np.arange(0, points.size - 1, max(1, points.size // 8192)), points.size - 1)
    wanted = np.cbrt(np.diff(mass[grid]) * np.diff(points[grid]) ** 2)
    reached = np.append(0.0, np.cumsum(wanted))
    return lambda fraction: grid[np.searchsorted(reached, fraction * reached[-1])]
