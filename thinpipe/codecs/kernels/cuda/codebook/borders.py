"""Step 4 of a codebook of up to 16 centres: the best borders between cells among those of groups of points.

Groups deserve equally many centres. Dynamic programming takes one cell more at every step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codebook.places import (
    ARRIVED,
    BORDERS,
    CHOICES,
    COSTS,
    GROUP_SUMS,
    GROUPS,
    MOST_POINTS,
    POINT_SUMS,
    POINTS,
    ROW,
)
from thinpipe.codecs.kernels.cuda.device import wait_for_all


@triton.jit
def search(numbers, wanted, count, RIGHT: tl.constexpr):
    """How many of the first ``count`` rising numbers lie below each wanted one; RIGHT: or are equal to it."""
    low = tl.zeros(wanted.shape, tl.int32)
    high = tl.zeros(wanted.shape, tl.int32) + count
    for _ in range(18):
        middle = (low + high) // 2
        number = tl.load(numbers + middle, mask=low < high, other=0.0)
        passed = (low < high) & ((number <= wanted) if RIGHT else (number < wanted))
        low = tl.where(passed, middle + 1, low)
        high = tl.where(passed, high, middle)
    return low


@triton.jit
def _cell_cost(mass, first, second):
    """The squared error of points about their mean, from their weight, first and second moment."""
    return tl.where(mass > 0, tl.maximum(second - first * first / tl.where(mass > 0, mass, 1.0), 0.0), 0.0)


@triton.jit
def group_points(scratch, points, all_shares):
    """This program's part of the borders of groups: the prefix sums there, and the error of one cell up to each."""
    sums, group_sums = scratch + POINT_SUMS, scratch + GROUP_SUMS
    for border in range(tl.program_id(0) * 4, GROUPS + 1, tl.num_programs(0) * 4):
        borders = border + tl.arange(0, 4)
        wanted = borders.to(tl.float64) * all_shares / GROUPS
        # Before the point: what gives it its share is the gap there, which is where a border belongs.
        places = tl.maximum(search(sums + 3 * MOST_POINTS, wanted, points + 1, False) - 1, 0)
        places = tl.where(borders == GROUPS, points, tl.where(borders == 0, 0, tl.minimum(places, points)))
        there = borders <= GROUPS
        mass = tl.load(sums + places, mask=there, other=0.0, cache_modifier=".cg")
        first = tl.load(sums + MOST_POINTS + places, mask=there, other=0.0, cache_modifier=".cg")
        second = tl.load(sums + 2 * MOST_POINTS + places, mask=there, other=0.0, cache_modifier=".cg")
        tl.store(group_sums + borders, mass, mask=there)
        tl.store(group_sums + ROW + borders, first, mask=there)
        tl.store(group_sums + 2 * ROW + borders, second, mask=there)
        tl.store(scratch + COSTS + borders, _cell_cost(mass, first, second), mask=there)


@triton.jit
def choose_borders(scratch, counters, arrivals, COUNT: tl.constexpr):
    """The least error of the groups before every border, in one cell more at every step: every program some borders."""
    sums, costs, choices = scratch + GROUP_SUMS, scratch + COSTS, scratch + CHOICES
    lanes = tl.arange(0, 2 * GROUPS)
    there = lanes <= GROUPS
    mass = tl.load(sums + lanes, mask=there, other=0.0, cache_modifier=".cg")
    first = tl.load(sums + ROW + lanes, mask=there, other=0.0, cache_modifier=".cg")
    second = tl.load(sums + 2 * ROW + lanes, mask=there, other=0.0, cache_modifier=".cg")
    for cell in range(1, COUNT):
        before = tl.load(costs + ((cell - 1) % 2) * ROW + lanes, mask=there, other=0.0, cache_modifier=".cg")
        for border in range(tl.program_id(0), GROUPS + 1, tl.num_programs(0)):
            end = tl.load(sums + border, cache_modifier=".cg")
            end1 = tl.load(sums + ROW + border, cache_modifier=".cg")
            end2 = tl.load(sums + 2 * ROW + border, cache_modifier=".cg")
            candidates = before + _cell_cost(end - mass, end1 - first, end2 - second)
            candidates = tl.where(lanes <= border, candidates, float("inf"))
            best = tl.min(candidates, axis=0)
            where = tl.min(tl.where(candidates == best, lanes, GROUPS), axis=0)
            tl.store(costs + (cell % 2) * ROW + border, best)
            tl.store(choices + cell * ROW + border, where.to(tl.float64))
        wait_for_all(counters + ARRIVED, arrivals)
        arrivals += tl.num_programs(0)


@triton.jit
def centres_of_best_cells(scratch, points, COUNT: tl.constexpr):
    """The means of the chosen cells, about the centre of all values."""
    cells = tl.arange(0, COUNT)
    borders, group_sums = scratch + BORDERS, scratch + GROUP_SUMS
    border = tl.zeros([], tl.int32) + GROUPS
    tl.store(borders + COUNT, border.to(tl.float64))
    for down in range(0, COUNT - 1):
        cell = COUNT - 1 - down
        border = tl.load(scratch + CHOICES + cell * ROW + border, cache_modifier=".cg").to(tl.int32)
        tl.store(borders + cell, border.to(tl.float64))
    tl.store(borders, tl.zeros([], tl.float64))
    tl.debug_barrier()
    begin = tl.load(borders + cells, cache_modifier=".cg").to(tl.int32)
    end = tl.load(borders + cells + 1, cache_modifier=".cg").to(tl.int32)
    mass = tl.load(group_sums + end) - tl.load(group_sums + begin)
    first = tl.load(group_sums + ROW + end) - tl.load(group_sums + ROW + begin)
    # A cell without a value gets the place where its border is.
    place = tl.load(group_sums + begin)
    at = tl.minimum(search(scratch + POINT_SUMS + 1, place, points, True), points - 1)
    return tl.where(mass > 0, first / tl.where(mass > 0, mass, 1.0), tl.load(scratch + POINTS + at))
