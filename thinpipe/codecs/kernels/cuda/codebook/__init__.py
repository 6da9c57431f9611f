"""The 2^b values with the least squared error, in one launch: from a histogram of the middle and of both tails.

    1. a sample says where the middle of the values lies, all but about a thousandth at either end
    2. one read of the tensor keeps all values of the tails. They are counted in bins of the leading bits of their
       keys, so that a bin is a 256th of an octave wide however long the tails are; and a sample of a million values of
       the middle in even bins
    3. bins become rising points with weights, and these prefix sums; groups of points that deserve equally many
       centres (as the cube root of mass * gap^2) become the candidates for borders between cells
    4. up to 16 centres: the best borders among the candidates, by dynamic programming, one cell more at every step.
       More centres start evenly among the groups. Lloyd's steps on the prefix sums finish

A bin stands for its greatest value, of the sample in the middle: values that many share are exact. All counts are
integers, so the result does not depend on the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codebook.borders import choose_borders, group_points
from thinpipe.codecs.kernels.cuda.codebook.lloyd import finish, poison
from thinpipe.codecs.kernels.cuda.codebook.middle import (
    count_middle,
    count_tails,
    draw_sample,
    find_middle,
    note_greatest,
)
from thinpipe.codecs.kernels.cuda.codebook.places import (
    ARRIVED,
    COUNTERS,
    EDGE_VALUES,
    EXTENTS,
    KEPT,
    LOST,
    MIDDLE,
    PARAMETERS,
    PARTIALS,
    POINT_SUMS,
    POINTS,
    SUM_PARTIALS,
    TOTALS,
)
from thinpipe.codecs.kernels.cuda.codebook.points import axis_of, sum_points, total_copies
from thinpipe.codecs.kernels.cuda.device import COLUMNS, bucket_affine, store_bytes, wait_for_all, whole_extent
from thinpipe.codecs.kernels.cuda.reading import read, room_for_all

__all__ = ["COUNTERS", "PARAMETERS", "codebook_kernel", "scratch_doubles", "slots_per_column"]


def slots_per_column(n: int, programs: int) -> int:
    """Room for values of the tails: for all of a small tensor, else for ten times as many as expected."""
    most = room_for_all(n, programs)
    return min(most, 64 + most // 50)


def scratch_doubles(n: int, programs: int) -> int:
    return KEPT.value + slots_per_column(n, programs) * COLUMNS.value * programs // 2


@triton.jit(do_not_specialize=["n", "room"])
def codebook_kernel(x, n, wire, counters, scratch, room, BITS: tl.constexpr, ZERO: tl.constexpr):
    """The codebook into the header of the wire, and the thresholds between its values into the scratch memory."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED
    drawn = (scratch + POINTS).to(tl.pointer_type(tl.float32))  # points come later
    edges = scratch + EDGE_VALUES
    draw_sample(x, n, drawn)
    if program == 0:
        tl.store(edges, tl.zeros([], tl.float64))  # of a sample of NaN no value is an edge
        tl.store(edges + 1, tl.zeros([], tl.float64))
    wait_for_all(arrived, programs)
    find_middle(n, drawn, edges)
    wait_for_all(arrived, 2 * programs)
    left, right = tl.load(edges, cache_modifier=".cg"), tl.load(edges + 1, cache_modifier=".cg")
    _count(x, n, counters, scratch, room, drawn, left.to(tl.float32), right.to(tl.float32))
    wait_for_all(arrived, 4 * programs)
    low, high, odd = whole_extent((scratch + EXTENTS).to(tl.pointer_type(tl.float32)))
    if odd == 0:
        _make_codebook(
            counters, scratch, left, right, low.to(tl.float64), high.to(tl.float64), n, wire, 5 * programs, BITS, ZERO
        )
    elif program == 0:
        poison(scratch, wire, BITS)
    if (program == 0) & (BITS == 1):
        store_bytes(wire + 8, tl.arange(0, 2), tl.zeros([2], tl.float32))  # the header's padding


@triton.jit
def _count(x, n, counters, scratch, room, drawn, left, right):
    """Step 2: this program's part of the middle and of the tails."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    affine = bucket_affine(left, right, MIDDLE)
    note_greatest(n, drawn, counters, left, right, affine)
    count_middle(x, n, counters, left, right, affine)
    store = (scratch + KEPT).to(tl.pointer_type(tl.float32)) + program.to(tl.int64) * room * COLUMNS
    sums = (scratch + SUM_PARTIALS).to(tl.pointer_type(tl.int64))
    extents = (scratch + EXTENTS).to(tl.pointer_type(tl.float32))
    infinity = float("inf")
    tails = ((-infinity, right, infinity), (left, infinity, infinity), (left, left))
    held, lost = read(x, n, store, room, sums, extents, tails, 2, 0, False)
    if tl.max(lost, axis=0) > 0:
        tl.store(counters + LOST, 1)
    wait_for_all(counters + ARRIVED, 3 * programs)
    if tl.load(counters + LOST, cache_modifier=".cg") == 0:
        count_tails(x, n, store, held, tl.max(held, axis=0), counters, left, right, True)
    else:
        count_tails(x, n, store, held, 0, counters, left, right, False)


@triton.jit
def _make_codebook(
    counters, scratch, left, right, low, high, n, wire, arrivals, BITS: tl.constexpr, ZERO: tl.constexpr
):
    """Steps 3 and 4: from the counts to the header of the wire and the thresholds between its values."""
    programs = tl.num_programs(0)
    totals, values, sums = scratch + TOTALS, scratch + POINTS, scratch + POINT_SUMS
    total_copies(counters, totals)
    wait_for_all(counters + ARRIVED, arrivals)
    axis, points = axis_of(left, right, low, high)
    centre = (left + right) / 2
    all_shares = sum_points(
        n, low, high, centre, counters, totals, scratch + PARTIALS, values, sums, axis, points, arrivals + programs
    )
    arrivals += 5 * programs
    if BITS <= 4:
        group_points(scratch, points, all_shares)
        wait_for_all(counters + ARRIVED, arrivals)
        choose_borders(scratch, counters, arrivals + programs, 1 << BITS)
    if tl.program_id(0) == 0:
        finish(scratch, points, all_shares, centre, low, high, wire, BITS, ZERO)
