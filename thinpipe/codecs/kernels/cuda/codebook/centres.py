"""Step 4 of the codebook search: one program computes the centres of cells from the prefix sums over points.

Up to 16 centres: candidate borders divide the points into groups with equal shares of the centres. Dynamic programming
over these borders adds one cell per step and minimizes the squared error. More centres start at even spacing among the
shares. Lloyd iterations on the prefix sums refine both.
"""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codebook.offsets import (
    BORDERS,
    CENTRE,
    CHOICES,
    CHOSEN,
    COUNT,
    HIGH,
    LOW,
    MOST_POINTS,
    NUMBERS,
    ODD,
    PARAMETERS,
    PLACES,
    POINT_SUMS,
    POINTS,
    SHARES,
)
from thinpipe.codecs.kernels.cuda.device import store_bytes


@triton.jit
def centres_kernel(wire, scratch, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Write the codebook to the header of the wire, and the thresholds between its values to the scratch memory."""
    CELLS: tl.constexpr = 1 << BITS
    if tl.load(scratch + NUMBERS + ODD) == 0:
        _make_codebook(wire, scratch, BITS, ZERO)
    else:  # a value is not finite: the codebook is NaN, and every value gets its first code
        store_bytes(wire, tl.arange(0, CELLS), tl.full([CELLS], float("nan"), tl.float32))
        _store_thresholds(scratch, tl.full([CELLS], float("inf"), tl.float32), CELLS)
    if BITS == 1:
        store_bytes(wire + 8, tl.arange(0, 2), tl.zeros([2], tl.float32))  # the header's padding


@triton.jit
def _store_thresholds(scratch, thresholds, CELLS: tl.constexpr):
    tl.store((scratch + PARAMETERS).to(tl.pointer_type(tl.float32)) + tl.arange(0, CELLS), thresholds)


@triton.jit
def _search(numbers, wanted, count, RIGHT: tl.constexpr):
    """Return how many of the first ``count`` rising numbers are below each wanted one; RIGHT: below or equal to it.

    Each step has 32 probes: a load takes as long as a thousand comparisons.
    """
    PROBES: tl.constexpr = 32
    found = tl.zeros(wanted.shape, tl.int32)
    left = tl.zeros(wanted.shape, tl.int32) + count  # candidates after the first ``found``
    while tl.max(left, axis=0) > 0:
        step = tl.cdiv(left, PROBES)
        probe = step[:, None] * (tl.arange(0, PROBES)[None, :] + 1) - 1
        there = probe < left[:, None]
        number = tl.load(numbers + found[:, None] + probe, mask=there, other=float("inf"))
        passed = there & ((number <= wanted[:, None]) if RIGHT else (number < wanted[:, None]))
        steps = tl.sum(passed.to(tl.int32), axis=1)
        found += steps * step
        left = tl.minimum(tl.maximum(step - 1, 0), left - steps * step)
    return found


@triton.jit
def _cell_cost(mass, first, second):
    """Return the squared error of points about their mean, from their weight, first and second moment."""
    return tl.where(mass > 0, tl.maximum(second - first * first / tl.where(mass > 0, mass, 1.0), 0.0), 0.0)


@triton.jit
def _moments(scratch, places):
    sums = scratch + POINT_SUMS
    return tl.load(sums + places), tl.load(sums + MOST_POINTS + places), tl.load(sums + 2 * MOST_POINTS + places)


@triton.jit
def _place_borders(scratch, points, all_shares):
    """Return and store the places of candidate borders, which divide the points into groups with equal shares."""
    borders = tl.arange(0, BORDERS)
    wanted = borders.to(tl.float64) * all_shares / (BORDERS - 1)
    # Before the point: the gap there gives the point its share, and a border belongs in the gap.
    places = tl.maximum(_search(scratch + POINT_SUMS + 3 * MOST_POINTS, wanted, points + 1, False) - 1, 0)
    places = tl.where(borders == BORDERS - 1, points, tl.where(borders == 0, 0, tl.minimum(places, points)))
    tl.store(scratch + PLACES + borders, places.to(tl.float64))
    return places


@triton.jit
def _choose_borders(scratch, places, CELLS: tl.constexpr):
    """Store the places of the best cells' borders from CHOSEN on, found by dynamic programming.

    Errors are fractions of the largest error of one cell: float32 can represent them, and its first 17 bits are enough
    to choose a start.
    """
    borders = tl.arange(0, BORDERS)
    mass, first, second = _moments(scratch, places)
    cost = _cell_cost(mass[:, None] - mass[None, :], first[:, None] - first[None, :], second[:, None] - second[None, :])
    largest = tl.max(tl.max(tl.where(borders[:, None] >= borders[None, :], cost, 0.0), axis=1), axis=0)
    cost = (cost * tl.where(largest > 0, 1 / tl.where(largest > 0, largest, 1.0), 0.0)).to(tl.float32)
    cost = tl.where(borders[:, None] >= borders[None, :], cost, float("inf"))
    best = tl.min(tl.where(borders[None, :] == 0, cost, float("inf")), axis=1)  # one cell up to every border
    for cell in range(1, CELLS):
        # The bits are ordered as the errors; the lowest hold the index. One number reduces in half the time of two.
        errors = (cost + best[None, :]).to(tl.int32, bitcast=True) & -BORDERS
        least = tl.min(errors | borders[None, :], axis=1)
        best = (least & -BORDERS).to(tl.float32, bitcast=True)
        tl.store(scratch + CHOICES + cell * BORDERS + borders, (least & (BORDERS - 1)).to(tl.float64))
    tl.debug_barrier()
    border = tl.full([], BORDERS - 1, tl.int32)
    tl.store(scratch + CHOSEN + CELLS, tl.load(scratch + PLACES + border))
    for down in range(1, CELLS):
        border = tl.load(scratch + CHOICES + (CELLS - down) * BORDERS + border).to(tl.int32)
        tl.store(scratch + CHOSEN + CELLS - down, tl.load(scratch + PLACES + border))
    tl.store(scratch + CHOSEN, tl.zeros([], tl.float64))
    tl.debug_barrier()


@triton.jit
def _start(scratch, points, all_shares, BITS: tl.constexpr):
    """Return the initial centres, relative to the centre of all values."""
    CELLS: tl.constexpr = 1 << BITS
    cells = tl.arange(0, CELLS)
    if BITS <= 4:
        _choose_borders(scratch, _place_borders(scratch, points, all_shares), CELLS)
        begin = tl.load(scratch + CHOSEN + cells).to(tl.int32)
        mass0, first0, _ = _moments(scratch, begin)
        mass1, first1, _ = _moments(scratch, tl.load(scratch + CHOSEN + cells + 1).to(tl.int32))
        # An empty cell gets the point at its border.
        nearby = tl.load(scratch + POINTS + tl.minimum(begin, points - 1))
        return tl.where(mass1 > mass0, (first1 - first0) / tl.where(mass1 > mass0, mass1 - mass0, 1.0), nearby)
    else:
        wanted = (cells.to(tl.float64) + 0.5) * all_shares / CELLS
        at = tl.minimum(_search(scratch + POINT_SUMS + 3 * MOST_POINTS + 1, wanted, points, False), points - 1)
        return tl.load(scratch + POINTS + at)


@triton.jit
def _following(values, CELLS: tl.constexpr):
    """Return, for every cell, the value of the next cell; infinity for the last one."""
    cells = tl.arange(0, CELLS)
    return tl.where(cells + 1 < CELLS, tl.gather(values, tl.minimum(cells + 1, CELLS - 1), 0), float("inf"))


@triton.jit
def _make_codebook(wire, scratch, BITS: tl.constexpr, ZERO: tl.constexpr):
    CELLS: tl.constexpr = 1 << BITS
    # From the best borders, five iterations come within 0.3 % of the CPU's error, eight within 0.25 %.
    STEPS: tl.constexpr = 5 if BITS <= 4 else 32
    cells = tl.arange(0, CELLS)
    points = tl.load(scratch + NUMBERS + COUNT).to(tl.int32)
    now = _start(scratch, points, tl.load(scratch + NUMBERS + SHARES), BITS)
    for _ in range(STEPS):
        border = (_following(now, CELLS) + now) / 2
        end = tl.where(cells + 1 < CELLS, _search(scratch + POINTS, border, points, True), points)
        begin = tl.where(cells > 0, tl.gather(end, tl.maximum(cells - 1, 0), 0), 0)
        mass0, first0, _ = _moments(scratch, begin)
        mass1, first1, _ = _moments(scratch, end)
        now = tl.where(mass1 > mass0, (first1 - first0) / tl.where(mass1 > mass0, mass1 - mass0, 1.0), now)
    low, high = tl.load(scratch + NUMBERS + LOW), tl.load(scratch + NUMBERS + HIGH)
    code = tl.minimum(tl.maximum(now + tl.load(scratch + NUMBERS + CENTRE), low), high).to(tl.float32)
    if ZERO:
        if (low <= 0) & (high >= 0):
            code = _with_zero(code, CELLS)
    store_bytes(wire, cells, code)
    middles = (_following(code, CELLS).to(tl.float64) + code.to(tl.float64)) / 2
    _store_thresholds(scratch, middles.to(tl.float32) + 0.0, CELLS)  # never -0


@triton.jit
def _with_zero(code, CELLS: tl.constexpr):
    """Put zero in place of a duplicate value, else of the one nearest it, as thinpipe.codecs.layout.with_zero does."""
    cells = tl.arange(0, CELLS)
    twice = code == _following(code, CELLS)
    first = tl.min(tl.where(twice, cells, CELLS), axis=0)
    nearest = tl.argmin(tl.abs(code), axis=0)
    return tl.sort(tl.where(cells == tl.where(first < CELLS, first, nearest), 0.0, code))
