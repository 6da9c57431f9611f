"""Step 3 of the codebook search: convert bins to rising points with weights, and these to prefix sums.

The points are the bins of the lower tail, those of the middle, and those of the upper tail. A tuple, ``axis``, locates
them: the number of bins of the lower tail and its first bin, the same of the upper tail, the least value of the middle,
and the width of its bins.
"""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codebook.middle import tail_place
from thinpipe.codecs.kernels.cuda.codebook.offsets import (
    ARRIVED,
    COPIES,
    COUNTED_VALUES,
    COUNTS,
    GREATEST,
    GREATEST_POINT,
    HALF_BIN,
    MIDDLE,
    MOST_POINTS,
    SEVERAL,
    TAIL_COUNTS,
    TAIL_GREATEST,
    TAIL_SHIFT,
    TAIL_VALUES,
    ZERO_BIN,
)
from thinpipe.codecs.kernels.cuda.device import MOST_PROGRAMS, float_of, key_of, total, wait_for_all


@triton.jit
def total_copies(counters, totals, partials):
    """Sum the copies of the histogram of the middle, in this program's part of the bins."""
    EACH: tl.constexpr = 64
    bins, copies = tl.arange(0, EACH), tl.arange(0, COPIES) * MIDDLE
    values = tl.zeros([EACH], tl.int32)
    for start in range(tl.program_id(0) * EACH, MIDDLE, tl.num_programs(0) * EACH):
        places = copies[:, None] + (start + bins)[None, :]
        counted = tl.sum(tl.load(counters + COUNTS + places, cache_modifier=".cg"), axis=0)
        tl.store(totals + start + bins, counted.to(tl.float64))
        values += counted
    tl.store(partials + COUNTED_VALUES + tl.program_id(0), tl.sum(values, axis=0).to(tl.float64))


@triton.jit
def _tail_bin(value):
    return (key_of(value.to(tl.float32)) >> TAIL_SHIFT) + ZERO_BIN


@triton.jit
def axis_of(left, right, low, high):
    """Return the axis for a middle from left to right and values from low to high, and the number of points."""
    first_low = _tail_bin(low)
    lows = tl.where(low < left, _tail_bin(left) - first_low + 1, 0)
    first_high = _tail_bin(right)
    highs = tl.where(high > right, _tail_bin(high) - first_high + 1, 0)
    return (lows, first_low, highs, first_high, left, (right - left) / MIDDLE), lows + MIDDLE + highs


@triton.jit
def _points(index, counters, totals, axis):
    """Return value and count of points, and a mask of those that are bins of the middle."""
    lows, first_low, highs, first_high, left, width = axis
    in_middle = (index >= lows) & (index < lows + MIDDLE)
    there = (index >= 0) & (index < lows + MIDDLE + highs)
    tail_bin = tl.where(index < lows, first_low + index, first_high + index - lows - MIDDLE)
    in_tail = there & ~in_middle
    greatest = (counters + TAIL_GREATEST).to(tl.pointer_type(tl.uint32))
    place = tail_place(tail_bin)
    tail_count = tl.load(counters + TAIL_COUNTS + place, mask=in_tail, other=0, cache_modifier=".cg")
    tail_top = tl.load(greatest + place, mask=in_tail, other=0, cache_modifier=".cg")
    nominal = ((tail_bin - ZERO_BIN) << TAIL_SHIFT) + HALF_BIN
    tail_key = tl.where(tail_top == 0, nominal, (tail_top ^ 0x80000000).to(tl.int32, bitcast=True))
    tail_value = float_of(tail_key).to(tl.float64)
    bin = tl.where(in_middle, index - lows, 0)
    count = tl.load(totals + bin, mask=in_middle, other=0.0, cache_modifier=".cg")
    greatest = (counters + GREATEST).to(tl.pointer_type(tl.uint32))
    top = tl.load(greatest + bin, mask=in_middle, other=0, cache_modifier=".cg")
    value = left + (bin.to(tl.float64) + 0.5) * width
    value = tl.where(top == 0, value, float_of((top ^ 0x80000000).to(tl.int32, bitcast=True)).to(tl.float64))
    value = tl.where(in_middle, value, tail_value)
    weight = tl.where(in_middle, count, tail_count.to(tl.float64))
    return value, weight, in_middle


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def _greatest_before(partials):
    """Return the greatest non-empty point of the programs before this one."""
    programs = tl.arange(0, MOST_PROGRAMS)
    before = programs < tl.program_id(0)
    points = tl.load(partials + GREATEST_POINT + programs, mask=before, other=float("-inf"), cache_modifier=".cg")
    return tl.max(points, axis=0)


@triton.jit
def _weigh(start, begin, end, last, weights, counters, totals, axis):
    """Return value, weight and share of the centres of points, and ``last``: the greatest non-empty point so far.

    A point's share is the cube root of its weight times the square of the gap before it. ``weights``: the number of
    values that one counted value of the middle represents, and the factor for gaps.
    """
    factor, part_of_all = weights
    index = start + tl.arange(0, SEVERAL)
    value, weight, in_middle = _points(index, counters, totals, axis)
    weight = tl.where(index < end, tl.where(in_middle, weight * factor, weight), 0.0)
    value = tl.where(index < end, value, 0.0)  # the value of a bin beyond the last one may be infinite
    other, other_weight, _ = _points(index - 1, counters, totals, axis)
    filled = (index > begin) & (index <= end) & (other_weight > 0)
    previous = tl.associative_scan(tl.where(filled & (index > start), other, float("-inf")), 0, _greater)
    gap = (value - tl.maximum(previous, last)) * part_of_all  # scaled, because its square might overflow
    base = tl.where((weight > 0) & (gap < float("inf")), weight * gap * gap, 0.0).to(tl.float32)
    share = tl.where(base > 0, tl.exp2(tl.log2(tl.maximum(base, 1e-37)) / 3), 0.0).to(tl.float64)
    last = tl.maximum(last, tl.max(tl.where(weight > 0, value, float("-inf")), axis=0))
    return value, weight, share, last


@triton.jit
def _store_tails(begin, end, counters, totals, partials, axis):
    """Store the number of values in the tails among this program's points, and its greatest non-empty point."""
    tails = tl.zeros([SEVERAL], tl.float64)
    last = tl.full([SEVERAL], float("-inf"), tl.float64)
    for start in range(begin, end, SEVERAL):
        index = start + tl.arange(0, SEVERAL)
        value, weight, is_middle = _points(index, counters, totals, axis)
        tails += tl.where((index < end) & ~is_middle, weight, 0.0)
        last = tl.maximum(last, tl.where((index < end) & (weight > 0), value, float("-inf")))
    tl.store(partials + TAIL_VALUES + tl.program_id(0), tl.sum(tails, axis=0))
    tl.store(partials + GREATEST_POINT + tl.program_id(0), tl.max(last, axis=0))


@triton.jit
def _added(sums, value, weight, share):
    """Return the sums of weight, first and second moment and share with a batch of points added."""
    return (
        sums[0] + tl.sum(weight, axis=0),
        sums[1] + tl.sum(weight * value, axis=0),
        sums[2] + tl.sum(weight * value * value, axis=0),
        sums[3] + tl.sum(share, axis=0),
    )


@triton.jit
def sum_points(n, low, high, centre, counters, totals, partials, values, sums, axis, points, arrivals):
    """Store all points relative to a centre, and their four prefix sums; return the sum of all shares.

    Moments about zero would cancel where all values are far from zero. Every program takes an equal part of the points;
    all programs wait at two barriers, from ``arrivals`` on.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED
    in_middle = total(partials + COUNTED_VALUES, 1, programs)
    each = tl.cdiv(points, programs)
    begin, end = program * each, tl.minimum(program * each + each, points)
    _store_tails(begin, end, counters, totals, partials, axis)
    wait_for_all(arrived, arrivals)
    # Values of the middle per counted value: the middle holds all that are in no tail.
    factor = (n - total(partials + TAIL_VALUES, 1, programs)) / tl.maximum(in_middle, 1.0)
    part_of_all = tl.where(high > low, 1.0 / tl.where(high > low, high - low, 1.0), 0.0)
    weights = (factor, part_of_all)
    last_before = _greatest_before(partials)
    last = last_before
    zero = tl.zeros([], tl.float64)
    mine = (zero, zero, zero, zero)
    for start in range(begin, end, SEVERAL):
        value, weight, share, last = _weigh(start, begin, end, last, weights, counters, totals, axis)
        mine = _added(mine, value - centre, weight, share)
    for which in tl.static_range(4):
        tl.store(partials + which * MOST_PROGRAMS + program, mine[which])
    wait_for_all(arrived, arrivals + programs)
    reached = (
        total(partials, 1, program),
        total(partials + MOST_PROGRAMS, 1, program),
        total(partials + 2 * MOST_PROGRAMS, 1, program),
        total(partials + 3 * MOST_PROGRAMS, 1, program),
    )
    last = last_before
    for start in range(begin, end, SEVERAL):
        value, weight, share, last = _weigh(start, begin, end, last, weights, counters, totals, axis)
        index = start + tl.arange(0, SEVERAL)
        there = index < end
        value -= centre
        tl.store(values + index, value, mask=there)
        tl.store(sums + index + 1, reached[0] + tl.cumsum(weight, axis=0), mask=there)
        tl.store(sums + MOST_POINTS + index + 1, reached[1] + tl.cumsum(weight * value, axis=0), mask=there)
        tl.store(sums + 2 * MOST_POINTS + index + 1, reached[2] + tl.cumsum(weight * value * value, axis=0), mask=there)
        tl.store(sums + 3 * MOST_POINTS + index + 1, reached[3] + tl.cumsum(share, axis=0), mask=there)
        reached = _added(reached, value, weight, share)
    if program == 0:
        for which in tl.static_range(4):
            tl.store(sums + which * MOST_POINTS, tl.zeros([], tl.float64))
    return total(partials + 3 * MOST_PROGRAMS, 1, programs)
