"""Scalar k-means on sorted points: dynamic programming and Lloyd's algorithm on prefix sums.

The sums are those of weight, weight*x and weight*x^2.
"""

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit

CAPPINGS = 8  # iterations that bring the unit nearer to where no group's share is above it


@jit
def group_ends(points, weights, most):
    """Return the ends (exclusive) of up to ``most`` groups of ascending weighted points.

    The optimal number of centres in a stretch is proportional to mass^(1/3) * width^(2/3) (Panter and Dite), and it
    gets that share of the groups; a value far from the rest becomes a group of its own. Up to ``most`` distinct values
    are a group each.
    """
    stretch = 8
    share = np.empty((points.size + stretch - 1) // stretch)
    for s in range(share.size):
        first, last = s * stretch, min((s + 1) * stretch, points.size)
        width = points[min(last, points.size - 1)] - points[first]
        share[s] = (weights[first:last].sum() * width * width) ** (1 / 3)
    distinct = 1
    for i in range(1, points.size):
        distinct += points[i] != points[i - 1]
    unit = share.sum() / most if distinct > most else 0.0
    # A few points far apart would have most of the share but can only be a group each: the others get the remainder.
    for _ in range(CAPPINGS):
        unit = np.minimum(share, stretch * unit).sum() / most
    ends = np.empty(min(distinct, most + 1), np.int64)
    groups, reached = 0, 0.0
    for i in range(points.size):
        reached += share[i // stretch] / stretch
        if i + 1 == points.size or (reached >= unit and points[i + 1] != points[i]):
            ends[groups] = i + 1
            groups += 1
            reached = 0.0
    return ends[:groups].copy()


@jit
def merge(points, weights, most):
    """Return the means and weights of up to ``most`` groups of ascending weighted points."""
    ends = group_ends(points, weights, most)
    means, masses = np.zeros(ends.size), np.zeros(ends.size)
    start = 0
    for group in range(ends.size):
        for i in range(start, ends[group]):
            masses[group] += weights[i]
            means[group] += weights[i] * points[i]
        means[group] /= masses[group]
        start = ends[group]
    return means, masses


@jit
def _cell_cost(sums, i, j):
    """Return the squared error of points i..j about their mean."""
    mass = sums[0, j] - sums[0, i]
    total = sums[1, j] - sums[1, i]
    return max(sums[2, j] - sums[2, i] - total * total / mass, 0.0) if mass > 0 else 0.0


@jit
def optimal_centres(sums, edges, count):
    """Return the centres of the best ``count`` cells with borders among the edges, by dynamic programming.

    cost[j] is the least error of the groups before edge j in the current number of cells. The best last border is
    monotonic in j, so the borders found for every second j bracket those between.
    """
    last = edges.size - 1
    cost = np.empty(last + 1)
    for j in range(last + 1):
        cost[j] = _cell_cost(sums, 0, edges[j])
    border = np.zeros((count, last + 1), np.int32)
    stride_of_all = 1
    while stride_of_all <= last:
        stride_of_all *= 2
    for cell in range(1, count):
        before = cost.copy()
        stride = stride_of_all
        while stride > 0:
            for j in range(stride, last + 1, 2 * stride):
                start = border[cell, j - stride]
                stop = border[cell, j + stride] if j + stride <= last else j
                best, where = np.inf, start
                for i in range(start, min(stop, j) + 1):
                    candidate = before[i] + _cell_cost(sums, edges[i], edges[j])
                    if candidate < best:
                        best, where = candidate, i
                cost[j] = best
                border[cell, j] = where
            stride //= 2
    centres = np.empty(count)
    j = last
    for cell in range(count - 1, -1, -1):
        i = border[cell, j] if cell > 0 else 0
        mass = sums[0, edges[j]] - sums[0, edges[i]]
        centres[cell] = (sums[1, edges[j]] - sums[1, edges[i]]) / mass if mass > 0 else np.nan
        j = i
    # Cells can be empty only at the front, if fewer cells cost no more.
    for cell in range(count - 2, -1, -1):
        if np.isnan(centres[cell]):
            centres[cell] = centres[cell + 1]
    return centres


@jit
def lloyd(points, sums, centres, steps):
    """Run up to ``steps`` steps of Lloyd's algorithm; return the squared error after the last step, and the centres."""
    centres = centres.copy()
    borders = np.zeros(centres.size + 1, np.int64)
    borders[-1] = points.size
    for _ in range(steps):
        borders[1:-1] = np.searchsorted(points, (centres[1:] + centres[:-1]) / 2, side="right")
        moved = False
        for i in range(centres.size):
            mass = sums[0, borders[i + 1]] - sums[0, borders[i]]
            if mass > 0:
                mean = (sums[1, borders[i + 1]] - sums[1, borders[i]]) / mass
                moved |= mean != centres[i]
                centres[i] = mean
        if not moved:
            break
    error = 0.0
    for i in range(centres.size):
        error += _cell_cost(sums, borders[i], borders[i + 1])
    return error, centres
