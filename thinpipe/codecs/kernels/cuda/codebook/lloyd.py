"""The end of a codebook: Lloyd's steps on the prefix sums, the header of the wire, and thresholds between its values."""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codebook.borders import centres_of_best_cells, search
from thinpipe.codecs.kernels.cuda.codebook.places import CENTRES, MOST_POINTS, PARAMETERS, POINT_SUMS, POINTS
from thinpipe.codecs.kernels.cuda.device import store_bytes


@triton.jit
def _with_zero(code, centres, COUNT: tl.constexpr):
    """As thinpipe.codecs.layout.with_zero: zero in place of a value that is there twice, else of the one nearest it."""
    cells = tl.arange(0, COUNT)
    tl.store(centres + cells, code.to(tl.float64))
    tl.debug_barrier()
    following = tl.load(centres + cells + 1, mask=cells + 1 < COUNT, other=float("inf"), cache_modifier=".cg")
    tl.debug_barrier()
    twice = tl.min(tl.where(code.to(tl.float64) == following, cells, COUNT), axis=0)
    nearest = tl.argmin(tl.abs(code), axis=0)
    return tl.sort(tl.where(cells == tl.where(twice < COUNT, twice, nearest), 0.0, code))


@triton.jit
def finish(scratch, points, all_shares, centre, low, high, wire, BITS: tl.constexpr, ZERO: tl.constexpr):
    """From the best borders, or an even start, by Lloyd's steps to the centres; header and thresholds."""
    COUNT: tl.constexpr = 1 << BITS
    STEPS: tl.constexpr = 6 if BITS <= 4 else 32
    cells = tl.arange(0, COUNT)
    values, sums, centres = scratch + POINTS, scratch + POINT_SUMS, scratch + CENTRES
    if BITS <= 4:
        centre_now = centres_of_best_cells(scratch, points, COUNT)
    else:
        wanted = (cells.to(tl.float64) + 0.5) * all_shares / COUNT
        at = tl.minimum(search(sums + 3 * MOST_POINTS + 1, wanted, points, False), points - 1)
        centre_now = tl.load(values + at)
    for _ in range(STEPS):
        tl.store(centres + cells, centre_now)
        tl.debug_barrier()
        following = tl.load(centres + cells + 1, mask=cells + 1 < COUNT, other=float("inf"), cache_modifier=".cg")
        previous = tl.load(centres + cells - 1, mask=cells > 0, other=float("-inf"), cache_modifier=".cg")
        tl.debug_barrier()
        begin = tl.where(cells > 0, search(values, (previous + centre_now) / 2, points, True), 0)
        end = tl.where(cells + 1 < COUNT, search(values, (following + centre_now) / 2, points, True), points)
        mass = tl.load(sums + end) - tl.load(sums + begin)
        first = tl.load(sums + MOST_POINTS + end) - tl.load(sums + MOST_POINTS + begin)
        centre_now = tl.where(mass > 0, first / tl.where(mass > 0, mass, 1.0), centre_now)
    code = tl.minimum(tl.maximum(centre_now + centre, low), high).to(tl.float32)
    if ZERO:
        if (low <= 0) & (high >= 0):
            code = _with_zero(code, centres, COUNT)
    store_bytes(wire, cells, code)
    tl.store(centres + cells, code.to(tl.float64))
    tl.debug_barrier()
    following = tl.load(centres + cells + 1, mask=cells + 1 < COUNT, other=float("inf"), cache_modifier=".cg")
    threshold = ((following + code.to(tl.float64)) / 2).to(tl.float32) + 0.0  # never -0, see negative
    parameters = (scratch + PARAMETERS).to(tl.pointer_type(tl.float32))
    tl.store(parameters + cells, threshold)


@triton.jit
def poison(scratch, wire, BITS: tl.constexpr):
    """A codebook of NaN, which every value is the first of: some value is not finite."""
    codes = tl.arange(0, 1 << BITS)
    store_bytes(wire, codes, tl.full([1 << BITS], float("nan"), tl.float32))
    parameters = (scratch + PARAMETERS).to(tl.pointer_type(tl.float32))
    tl.store(parameters + codes, tl.full([1 << BITS], float("inf"), tl.float32))
