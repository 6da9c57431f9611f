"""The search for the 2^b values of least squared error: two launches, from histograms of the middle and both tails.

    1. a sample locates the middle of the values: all but about a thousandth at either end
    2. one pass over the tensor keeps all values of the tails. They are counted in a histogram by the leading bits of
       their keys, so that a bin is a 256th of an octave wide however long the tails are. A sample of up to 262,144
       values is counted in even bins of the middle
    3. bins become rising points with weights, and these become prefix sums. A point's share of the centres is
       proportional to the cube root of mass * gap^2
    4. a second launch, of one program, computes the centres (centres.py)

A bin is represented by its greatest value, in the middle by the greatest of the sample: values that many elements share
are exact. All counts are integers, so the result does not depend on the order in which programs run.
"""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codebook.centres import centres_kernel
from thinpipe.codecs.kernels.cuda.codebook.middle import (
    count_middle,
    count_tails,
    draw_sample,
    find_middle,
    note_greatest,
    part_off_tails,
)
from thinpipe.codecs.kernels.cuda.codebook.offsets import (
    ARRIVED,
    CENTRE,
    COUNT,
    COUNTERS,
    EXTENTS,
    HIGH,
    INTERVAL_COUNTS,
    KEPT,
    LOST,
    LOW,
    MIDDLE,
    NUMBERS,
    ODD,
    PARAMETERS,
    PARTIALS,
    POINT_SUMS,
    POINTS,
    SHARES,
    TABLES,
    TOTALS,
)
from thinpipe.codecs.kernels.cuda.codebook.points import axis_of, sum_points, total_copies
from thinpipe.codecs.kernels.cuda.counting import THREADS, capacity_for_all, read, read_rest
from thinpipe.codecs.kernels.cuda.device import bucket_affine, reduce_extents, wait_for_all
from thinpipe.codecs.kernels.cuda.offsets import INTERVALS

__all__ = ["COUNTERS", "PARAMETERS", "centres_kernel", "points_kernel", "scratch_doubles", "slots_per_column"]


def slots_per_column(n: int, programs: int) -> int:
    """Return the slots for values of the tails: all of a small tensor, else ten times the expected number."""
    most = capacity_for_all(n, programs)
    return min(most, 32 + most // 50)


def scratch_doubles(n: int, programs: int) -> int:
    return KEPT.value + slots_per_column(n, programs) * THREADS.value * programs // 2


@triton.jit(do_not_specialize=["n", "capacity"])
def points_kernel(x, n, counters, scratch, capacity):
    """Run steps 1 to 3: store the points, their prefix sums and the parameters of centres_kernel."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED
    drawn = (scratch + POINTS).to(tl.pointer_type(tl.float32))  # the points are stored there later
    draw_sample(x, n, drawn)
    wait_for_all(arrived, programs)
    left, right = find_middle(n, drawn)
    _count(x, n, counters, scratch, capacity, drawn, left, right)
    wait_for_all(arrived, 3 * programs)
    low, high, odd = reduce_extents((scratch + EXTENTS).to(tl.pointer_type(tl.float32)))
    low, high = low.to(tl.float64), high.to(tl.float64)
    if odd == 0:
        _make_points(counters, scratch, left.to(tl.float64), right.to(tl.float64), low, high, n, 4 * programs)
    if program == 0:
        tl.store(scratch + NUMBERS + LOW, low)
        tl.store(scratch + NUMBERS + HIGH, high)
        tl.store(scratch + NUMBERS + ODD, odd.to(tl.float64))


@triton.jit
def _count(x, n, counters, scratch, capacity, drawn, left, right):
    """Run step 2: count this program's part of the middle and of the tails."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    affine = bucket_affine(left, right, MIDDLE)
    note_greatest(n, drawn, counters, left, right, affine)
    count_middle(x, n, counters, left, right, affine)
    columns = (scratch + KEPT).to(tl.pointer_type(tl.float32)) + program.to(tl.int64) * capacity * THREADS
    columns += tl.arange(0, THREADS)
    table = (scratch + TABLES).to(tl.pointer_type(tl.float32)) + program * (2 * INTERVALS)
    part_off_tails(table, left, right)
    extents = (scratch + EXTENTS).to(tl.pointer_type(tl.float32))
    totals = (counters + INTERVAL_COUNTS).to(tl.pointer_type(tl.int64))
    so_far = read(x, n, table, 2, columns, capacity, totals, 8, False)
    held, lost = read_rest(x, n, table, 2, columns, capacity, totals, extents, so_far, False)
    if tl.max(lost, axis=0) > 0:
        tl.store(counters + LOST, 1)
    wait_for_all(counters + ARRIVED, 2 * programs)
    all_kept = tl.load(counters + LOST, cache_modifier=".cg") == 0
    count_tails(x, n, columns, held, counters, left, right, all_kept)


@triton.jit
def _make_points(counters, scratch, left, right, low, high, n, arrivals):
    """Run step 3: compute points and prefix sums from the counts."""
    programs = tl.num_programs(0)
    totals, values, sums = scratch + TOTALS, scratch + POINTS, scratch + POINT_SUMS
    total_copies(counters, totals, scratch + PARTIALS)
    wait_for_all(counters + ARRIVED, arrivals)
    axis, points = axis_of(left, right, low, high)
    centre = (left + right) / 2
    all_shares = sum_points(
        n, low, high, centre, counters, totals, scratch + PARTIALS, values, sums, axis, points, arrivals + programs
    )
    if tl.program_id(0) == 0:
        tl.store(scratch + NUMBERS + COUNT, points.to(tl.float64))
        tl.store(scratch + NUMBERS + SHARES, all_shares)
        tl.store(scratch + NUMBERS + CENTRE, centre)
