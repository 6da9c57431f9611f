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

from thinpipe.codecs.kernels.cuda.device import (
    COLUMNS,
    ROWS,
    TILE,
    float_of,
    key_of,
    load_values,
    sample_places,
    store_bytes,
    wait_for_all,
)
from thinpipe.codecs.kernels.cuda.places import MOST_PROGRAMS
from thinpipe.codecs.kernels.cuda.reading import load_part, parts, read

SAMPLE = tl.constexpr(4096)
TAIL = tl.constexpr(1024)  # one in so many values of the sample lies beyond the middle, at either end
MIDDLE = tl.constexpr(8192)  # bins
COPIES = tl.constexpr(32)  # of their counts: half of a ReLU's values meet in one bin
TAIL_SHIFT = tl.constexpr(15)
TAILS = tl.constexpr(131072)  # 2^32 keys >> TAIL_SHIFT
ZERO_BIN = tl.constexpr(65536)  # of the key 0
GROUPS = tl.constexpr(512)
CHUNK = tl.constexpr(1024)
COUNTED = tl.constexpr(1048576)  # values in the sample of the middle

# Places in the counters, int32, all zero at the launch.
ARRIVED = tl.constexpr(0)
LOST = tl.constexpr(1)  # there was no room for all values of the tails
TAIL_COUNTS = tl.constexpr(64)
TAIL_GREATEST = tl.constexpr(64 + 131072)
GREATEST = tl.constexpr(64 + 2 * 131072)
COUNTS = tl.constexpr(64 + 2 * 131072 + 8192)
COUNTERS = 64 + 2 * 131072 + 8192 + 32 * 8192

# Places in the scratch memory, float64, not initialised.
EDGE_VALUES = tl.constexpr(0)  # least and greatest value of the middle
EXTENTS = tl.constexpr(16)  # float32, of every program: least, greatest, NaN if a value is not finite
PARTIALS = tl.constexpr(16 + 3 * 512)  # of every program: sums of its points
CENTRES = tl.constexpr(16 + 7 * 512)
BORDERS = tl.constexpr(16 + 7 * 512 + 512)
GROUP_SUMS = tl.constexpr(16 + 9 * 512)  # prefix sums at the borders of groups: weight, first and second moment
COSTS = tl.constexpr(16 + 9 * 512 + 3 * 1024)
CHOICES = tl.constexpr(16 + 9 * 512 + 5 * 1024)  # where the last cell begins at best, for every number of cells
PARAMETERS = tl.constexpr(16 + 9 * 512 + 21 * 1024)  # float32 from here: what encode_kernel wants
TOTALS = tl.constexpr(16 + 10 * 512 + 21 * 1024)
POINTS = tl.constexpr(16 + 10 * 512 + 21 * 1024 + 8192)
MOST_POINTS = tl.constexpr(131072 + 8192 + 64)
SUM_PARTIALS = tl.constexpr(16 + 10 * 512 + 21 * 1024 + 8192 + 5 * (131072 + 8192 + 64))  # of the read, not used
KEPT = tl.constexpr(16 + 26 * 512 + 21 * 1024 + 8192 + 5 * (131072 + 8192 + 64))  # float32: values of the tails


def slots_per_column(n: int, programs: int) -> int:
    """Room for values of the tails: for all of a small tensor, else for ten times as many as expected."""
    most = (n // TILE.value // programs + 2) * ROWS.value
    return min(most, 64 + most // 50)


def scratch_doubles(n: int, programs: int) -> int:
    return KEPT.value + slots_per_column(n, programs) * COLUMNS.value * programs // 2


@triton.jit
def _find_middle(x, n, drawn, edges):
    """Every program ranks a few values of the sample; those that are an edge of the middle are stored."""
    FEW: tl.constexpr = 16
    MANY: tl.constexpr = 256
    size = tl.minimum(n, SAMPLE)
    for start in range(tl.program_id(0) * FEW, size, tl.num_programs(0) * FEW):
        mine = start + tl.arange(0, FEW)
        values = tl.load(drawn + mine, mask=mine < size, other=float("nan"), cache_modifier=".cg")
        before = tl.zeros([FEW, MANY], tl.int32)
        for other in range(0, size, MANY):
            others = other + tl.arange(0, MANY)
            against = tl.load(drawn + others, mask=others < size, other=float("nan"), cache_modifier=".cg")
            less = against[None, :] < values[:, None]
            tied = (against[None, :] == values[:, None]) & (others[None, :] < mine[:, None])
            before += (less | tied).to(tl.int32)
        rank = tl.sum(before, axis=1)
        there = (mine < size) & (values * 0.0 == 0)  # NaN and infinity are no edges
        tl.store(edges + 0 * mine, values.to(tl.float64), mask=there & (rank == size // TAIL))
        tl.store(edges + 1 + 0 * mine, values.to(tl.float64), mask=there & (rank == size - 1 - size // TAIL))


@triton.jit
def _bin_of(values, factor, offset, scale):
    """The bin of a value of the middle: (x*p - offset)*scale, with p as thinpipe.codecs.layout.bucket_affine has it."""
    return tl.minimum(tl.maximum((values * factor - offset) * scale, 0.0), MIDDLE - 1.0).to(tl.int32)


@triton.jit
def _count_tails(x, n, store, held, slots, counters, left, right, KEPT_ONES: tl.constexpr):
    """This program's values of the tails, among the kept ones or in the whole tensor, by the bits of their keys."""
    greatest = (counters + TAIL_GREATEST).to(tl.pointer_type(tl.uint32))
    for part in range(0, parts(n, slots, KEPT_ONES)):
        values, there = load_part(x, n, store, held, part, KEPT_ONES, False)
        there &= (values < left) | (values > right)
        keys = key_of(values)
        bins = (keys >> TAIL_SHIFT) + ZERO_BIN
        tl.atomic_add(counters + TAIL_COUNTS + bins, 1, mask=there, sem="relaxed")
        tl.atomic_max(greatest + bins, keys.to(tl.uint32, bitcast=True) ^ 0x80000000, mask=there, sem="relaxed")


@triton.jit
def _count_middle(x, n, counters, left, right, factor, offset, scale):
    """This program's part of a sample of the tensor, or of all of a small one: values of the middle, in even bins."""
    size = tl.cast(tl.minimum(n, COUNTED), tl.int32)
    stride = tl.cast(n // size, tl.int64)
    counts = counters + COUNTS + (tl.program_id(0) % COPIES) * MIDDLE
    for start in range(tl.program_id(0) * CHUNK, size, tl.num_programs(0) * CHUNK):
        index = start + tl.arange(0, CHUNK)
        values = load_values(x, sample_places(index, stride), index < size, False)
        inside = (index < size) & (values >= left) & (values <= right)
        tl.atomic_add(counts + _bin_of(values, factor, offset, scale), 1, mask=inside, sem="relaxed")


@triton.jit
def _points(index, counters, totals, lows, first_low, highs, first_high, left, width):
    """Value and count of points, and which of them are bins of the middle."""
    in_middle = (index >= lows) & (index < lows + MIDDLE)
    there = (index >= 0) & (index < lows + MIDDLE + highs)
    tail_bin = tl.where(index < lows, first_low + index, first_high + index - lows - MIDDLE)
    in_tail = there & ~in_middle
    greatest = (counters + TAIL_GREATEST).to(tl.pointer_type(tl.uint32))
    tail_count = tl.load(counters + TAIL_COUNTS + tail_bin, mask=in_tail, other=0, cache_modifier=".cg")
    tail_top = tl.load(greatest + tail_bin, mask=in_tail, other=0, cache_modifier=".cg")
    nominal = ((tail_bin - ZERO_BIN) << TAIL_SHIFT) + 16384  # the middle of a bin
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
def _total(partials, which):
    programs = tl.arange(0, MOST_PROGRAMS)
    parts = tl.load(
        partials + which * MOST_PROGRAMS + programs,
        mask=programs < tl.num_programs(0),
        other=0.0,
        cache_modifier=".cg",
    )
    return tl.sum(parts, axis=0)


@triton.jit
def _total_before(partials, which):
    programs = tl.arange(0, MOST_PROGRAMS)
    parts = tl.load(
        partials + which * MOST_PROGRAMS + programs, mask=programs < tl.program_id(0), other=0.0, cache_modifier=".cg"
    )
    return tl.sum(parts, axis=0)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def _greatest_before(partials):
    """The greatest point with a value in it, of the programs before this one."""
    programs = tl.arange(0, MOST_PROGRAMS)
    before = programs < tl.program_id(0)
    points = tl.load(partials + MOST_PROGRAMS + programs, mask=before, other=float("-inf"), cache_modifier=".cg")
    return tl.max(points, axis=0)


@triton.jit
def _weigh(
    start, begin, end, last, factor, part_of_all, counters, totals, lows, first_low, highs, first_high, left, width
):
    """Value, weight and share of the centres of points; ``last``: the greatest point before, now of these.

    Points deserve centres as the cube root of their weight times the square of the gap before them.
    """
    index = start + tl.arange(0, CHUNK)
    value, weight, in_middle = _points(index, counters, totals, lows, first_low, highs, first_high, left, width)
    weight = tl.where(index < end, tl.where(in_middle, weight * factor, weight), 0.0)
    value = tl.where(index < end, value, 0.0)  # what a bin beyond the last one stands for may be infinite
    other, other_weight, _ = _points(index - 1, counters, totals, lows, first_low, highs, first_high, left, width)
    filled = (index > begin) & (index <= end) & (other_weight > 0)
    previous = tl.associative_scan(tl.where(filled & (index > start), other, float("-inf")), 0, _greater)
    gap = (value - tl.maximum(previous, last)) * part_of_all  # or its square might overflow
    base = tl.where((weight > 0) & (gap < float("inf")), weight * gap * gap, 0.0).to(tl.float32)
    share = tl.where(base > 0, tl.exp2(tl.log2(tl.maximum(base, 1e-37)) / 3), 0.0).to(tl.float64)
    last = tl.maximum(last, tl.max(tl.where(weight > 0, value, float("-inf")), axis=0))
    return value, weight, share, last


@triton.jit
def _search(sums, wanted, points, RIGHT: tl.constexpr):
    """How many of the first ``points`` rising numbers lie below each wanted one; RIGHT: or are equal to it."""
    low = tl.zeros(wanted.shape, tl.int32)
    high = tl.zeros(wanted.shape, tl.int32) + points
    for _ in range(18):
        middle = (low + high) // 2
        number = tl.load(sums + middle, mask=low < high, other=0.0)
        passed = (low < high) & ((number <= wanted) if RIGHT else (number < wanted))
        low = tl.where(passed, middle + 1, low)
        high = tl.where(passed, high, middle)
    return low


@triton.jit
def _cell_cost(mass, first, second):
    """The squared error of points about their mean, from their weight, first and second moment."""
    return tl.where(mass > 0, tl.maximum(second - first * first / tl.where(mass > 0, mass, 1.0), 0.0), 0.0)


@triton.jit
def _choose_borders(sums, costs, choices, arrived, arrivals, COUNT: tl.constexpr):
    """The least error of the groups before every border, in one cell more at every step: every program some borders."""
    lanes = tl.arange(0, 2 * GROUPS)
    there = lanes <= GROUPS
    mass = tl.load(sums + lanes, mask=there, other=0.0, cache_modifier=".cg")
    first = tl.load(sums + 1024 + lanes, mask=there, other=0.0, cache_modifier=".cg")
    second = tl.load(sums + 2048 + lanes, mask=there, other=0.0, cache_modifier=".cg")
    for cell in range(1, COUNT):
        before = tl.load(costs + ((cell - 1) % 2) * 1024 + lanes, mask=there, other=0.0, cache_modifier=".cg")
        for border in range(tl.program_id(0), GROUPS + 1, tl.num_programs(0)):
            end = tl.load(sums + border, cache_modifier=".cg")
            end1 = tl.load(sums + 1024 + border, cache_modifier=".cg")
            end2 = tl.load(sums + 2048 + border, cache_modifier=".cg")
            candidates = before + _cell_cost(end - mass, end1 - first, end2 - second)
            candidates = tl.where(lanes <= border, candidates, float("inf"))
            best = tl.min(candidates, axis=0)
            where = tl.min(tl.where(candidates == best, lanes, GROUPS), axis=0)
            tl.store(costs + (cell % 2) * 1024 + border, best)
            tl.store(choices + cell * 1024 + border, where.to(tl.float64))
        wait_for_all(arrived, arrivals)
        arrivals += tl.num_programs(0)


@triton.jit(do_not_specialize=["n", "room"])
def codebook_kernel(x, n, wire, counters, scratch, room, BITS: tl.constexpr, ZERO: tl.constexpr):
    """The codebook into the header of the wire, and the thresholds between its values into the scratch memory."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED
    arrivals = programs
    drawn = (scratch + POINTS).to(tl.pointer_type(tl.float32))  # points come later
    edges, partials = scratch + EDGE_VALUES, scratch + PARTIALS
    extents = (scratch + EXTENTS).to(tl.pointer_type(tl.float32))
    size = tl.cast(tl.minimum(n, SAMPLE), tl.int32)
    for start in range(program * CHUNK, size, programs * CHUNK):
        index = start + tl.arange(0, CHUNK)
        values = load_values(x, sample_places(index, tl.cast(n // size, tl.int64)), index < size, False)
        tl.store(drawn + index, values, mask=index < size)
    if program == 0:
        tl.store(edges, tl.zeros([], tl.float64))  # of a sample of NaN no value is an edge
        tl.store(edges + 1, tl.zeros([], tl.float64))
    wait_for_all(arrived, arrivals)
    _find_middle(x, n, drawn, edges)
    wait_for_all(arrived, arrivals + programs)
    arrivals += 2 * programs
    left, right = tl.load(edges, cache_modifier=".cg"), tl.load(edges + 1, cache_modifier=".cg")
    span = right - left
    left32, right32 = left.to(tl.float32), right.to(tl.float32)
    factor = tl.where(span > 2.0**126, 2.0**-3, tl.where((span > 0) & (span < 2.0**-96), 2.0**100, 1.0)).to(tl.float64)
    scale = tl.where(span > 0, 1.0 / tl.where(span > 0, span * factor, 1.0) * MIDDLE, 0.0).to(tl.float32)
    offset = (left * factor).to(tl.float32)
    factor = factor.to(tl.float32)
    for start in range(program * CHUNK, size, programs * CHUNK):
        index = start + tl.arange(0, CHUNK)
        values = tl.load(drawn + index, mask=index < size, other=float("nan"), cache_modifier=".cg")
        inside = (values >= left32) & (values <= right32)
        rising = key_of(values).to(tl.uint32, bitcast=True) ^ 0x80000000
        greatest = (counters + GREATEST).to(tl.pointer_type(tl.uint32))
        tl.atomic_max(greatest + _bin_of(values, factor, offset, scale), rising, mask=inside, sem="relaxed")
    _count_middle(x, n, counters, left32, right32, factor, offset, scale)
    store = (scratch + KEPT).to(tl.pointer_type(tl.float32)) + program.to(tl.int64) * room * COLUMNS
    sums = (scratch + SUM_PARTIALS).to(tl.pointer_type(tl.int64))
    infinity = float("inf")
    held, lost = read(
        x, n, store, room, sums, extents, -infinity, left32, right32, infinity, infinity, infinity, left32, left32,
        2, 0, False,
    )  # fmt: skip
    if tl.max(lost, axis=0) > 0:
        tl.store(counters + LOST, 1)
    wait_for_all(arrived, arrivals)
    if tl.load(counters + LOST, cache_modifier=".cg") == 0:
        _count_tails(x, n, store, held, tl.max(held, axis=0), counters, left32, right32, True)
    else:
        _count_tails(x, n, store, held, 0, counters, left32, right32, False)
    wait_for_all(arrived, arrivals + programs)
    arrivals += programs
    lanes = tl.arange(0, MOST_PROGRAMS)
    running = lanes < programs
    low = tl.min(tl.load(extents + lanes, mask=running, other=float("inf"), cache_modifier=".cg"), axis=0).to(
        tl.float64
    )
    highs = tl.load(extents + MOST_PROGRAMS + lanes, mask=running, other=float("-inf"), cache_modifier=".cg")
    high = tl.max(highs, axis=0).to(tl.float64)
    odd = tl.sum(tl.load(extents + 2 * MOST_PROGRAMS + lanes, mask=running, other=0.0, cache_modifier=".cg"), axis=0)
    if odd == 0:
        _make_codebook(
            counters, scratch, partials, arrived, arrivals + programs, left, right, low, high, n, wire, BITS, ZERO
        )
    elif program == 0:
        codes = tl.arange(0, 1 << BITS)
        store_bytes(wire, codes, tl.full([1 << BITS], float("nan"), tl.float32))
        parameters = (scratch + PARAMETERS).to(tl.pointer_type(tl.float32))
        tl.store(parameters + codes, tl.full([1 << BITS], float("inf"), tl.float32))
    if (program == 0) & (BITS == 1):
        store_bytes(wire + 8, tl.arange(0, 2), tl.zeros([2], tl.float32))  # the header's padding


@triton.jit
def _make_codebook(
    counters, scratch, partials, arrived, arrivals, left, right, low, high, n, wire,
    BITS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Steps 3 and 4: from the counts to the header of the wire and the thresholds between its values."""
    COUNT: tl.constexpr = 1 << BITS
    program, programs = tl.program_id(0), tl.num_programs(0)
    totals = scratch + TOTALS
    bins = tl.arange(0, 64)
    for start in range(program * 64, MIDDLE, programs * 64):
        total = tl.zeros([64], tl.int32)
        for copy in range(COPIES):
            total += tl.load(counters + COUNTS + copy * MIDDLE + start + bins, cache_modifier=".cg")
        tl.store(totals + start + bins, total.to(tl.float64))
    wait_for_all(arrived, arrivals)
    counted = tl.zeros([CHUNK], tl.float64)
    for start in range(0, MIDDLE, CHUNK):
        counted += tl.load(totals + start + tl.arange(0, CHUNK), cache_modifier=".cg")
    in_middle = tl.sum(counted, axis=0)
    # Points: bins of the lower tail, bins of the middle, bins of the upper tail.
    first_low = (key_of(low.to(tl.float32)) >> TAIL_SHIFT) + ZERO_BIN
    last_low = (key_of(left.to(tl.float32)) >> TAIL_SHIFT) + ZERO_BIN
    lows = tl.where(low < left, last_low - first_low + 1, 0)
    first_high = (key_of(right.to(tl.float32)) >> TAIL_SHIFT) + ZERO_BIN
    last_high = (key_of(high.to(tl.float32)) >> TAIL_SHIFT) + ZERO_BIN
    highs = tl.where(high > right, last_high - first_high + 1, 0)
    points = lows + MIDDLE + highs
    width = (right - left) / MIDDLE
    centre = (left + right) / 2  # moments about it: about zero they would cancel where all values are far from zero
    each = tl.cdiv(points, programs)
    begin, end = program * each, tl.minimum(program * each + each, points)
    # How many values of the middle stand for one that was counted: all that are in no tail.
    tails = tl.zeros([CHUNK], tl.float64)
    last = tl.full([CHUNK], float("-inf"), tl.float64)
    for start in range(begin, end, CHUNK):
        index = start + tl.arange(0, CHUNK)
        value, weight, is_middle = _points(index, counters, totals, lows, first_low, highs, first_high, left, width)
        tails += tl.where((index < end) & ~is_middle, weight, 0.0)
        last = tl.maximum(last, tl.where((index < end) & (weight > 0), value, float("-inf")))
    tl.store(partials + program, tl.sum(tails, axis=0))
    tl.store(partials + MOST_PROGRAMS + program, tl.max(last, axis=0))
    wait_for_all(arrived, arrivals + programs)
    factor = (n - _total(partials, 0)) / tl.maximum(in_middle, 1.0)
    part_of_all = tl.where(high > low, 1.0 / tl.where(high > low, high - low, 1.0), 0.0)
    last_before = _greatest_before(partials)
    last_point = last_before
    mass = tl.zeros([], tl.float64)
    first = tl.zeros([], tl.float64)
    second = tl.zeros([], tl.float64)
    shares = tl.zeros([], tl.float64)
    for start in range(begin, end, CHUNK):
        value, weight, share, last_point = _weigh(
            start,
            begin,
            end,
            last_point,
            factor,
            part_of_all,
            counters,
            totals,
            lows,
            first_low,
            highs,
            first_high,
            left,
            width,
        )
        value -= centre
        mass += tl.sum(weight, axis=0)
        first += tl.sum(weight * value, axis=0)
        second += tl.sum(weight * value * value, axis=0)
        shares += tl.sum(share, axis=0)
    wait_for_all(arrived, arrivals + 2 * programs)
    tl.store(partials + program, mass)
    tl.store(partials + MOST_PROGRAMS + program, first)
    tl.store(partials + 2 * MOST_PROGRAMS + program, second)
    tl.store(partials + 3 * MOST_PROGRAMS + program, shares)
    wait_for_all(arrived, arrivals + 3 * programs)
    mass, first = _total_before(partials, 0), _total_before(partials, 1)
    second, shares = _total_before(partials, 2), _total_before(partials, 3)
    values = scratch + POINTS
    sums = scratch + POINTS + MOST_POINTS
    last_point = last_before
    for start in range(begin, end, CHUNK):
        value, weight, share, last_point = _weigh(
            start,
            begin,
            end,
            last_point,
            factor,
            part_of_all,
            counters,
            totals,
            lows,
            first_low,
            highs,
            first_high,
            left,
            width,
        )
        index = start + tl.arange(0, CHUNK)
        there = index < end
        value -= centre
        tl.store(values + index, value, mask=there)
        tl.store(sums + index + 1, mass + tl.cumsum(weight, axis=0), mask=there)
        tl.store(sums + MOST_POINTS + index + 1, first + tl.cumsum(weight * value, axis=0), mask=there)
        tl.store(sums + 2 * MOST_POINTS + index + 1, second + tl.cumsum(weight * value * value, axis=0), mask=there)
        tl.store(sums + 3 * MOST_POINTS + index + 1, shares + tl.cumsum(share, axis=0), mask=there)
        mass += tl.sum(weight, axis=0)
        first += tl.sum(weight * value, axis=0)
        second += tl.sum(weight * value * value, axis=0)
        shares += tl.sum(share, axis=0)
    if program == 0:
        for which in tl.static_range(4):
            tl.store(sums + which * MOST_POINTS, tl.zeros([], tl.float64))
    all_shares = _total(partials, 3)
    wait_for_all(arrived, arrivals + 4 * programs)
    arrivals += 5 * programs
    if BITS <= 4:
        group_sums = scratch + GROUP_SUMS
        for border in range(program * 4, GROUPS + 1, programs * 4):
            borders = border + tl.arange(0, 4)
            wanted = borders.to(tl.float64) * all_shares / GROUPS
            # Before the point: what gives it its share is the gap there, which is where a border belongs.
            places = tl.maximum(_search(sums + 3 * MOST_POINTS, wanted, points + 1, False) - 1, 0)
            places = tl.where(borders == GROUPS, points, tl.where(borders == 0, 0, tl.minimum(places, points)))
            there = borders <= GROUPS
            group_mass = tl.load(sums + places, mask=there, other=0.0, cache_modifier=".cg")
            group_first = tl.load(sums + MOST_POINTS + places, mask=there, other=0.0, cache_modifier=".cg")
            group_second = tl.load(sums + 2 * MOST_POINTS + places, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(group_sums + borders, group_mass, mask=there)
            tl.store(group_sums + 1024 + borders, group_first, mask=there)
            tl.store(group_sums + 2048 + borders, group_second, mask=there)
            tl.store(scratch + COSTS + borders, _cell_cost(group_mass, group_first, group_second), mask=there)
        wait_for_all(arrived, arrivals)
        arrivals += programs
        _choose_borders(group_sums, scratch + COSTS, scratch + CHOICES, arrived, arrivals, COUNT)
    if program == 0:
        _finish(scratch, values, sums, points, all_shares, centre, low, high, wire, BITS, ZERO)


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
def _finish(scratch, values, sums, points, all_shares, centre, low, high, wire, BITS: tl.constexpr, ZERO: tl.constexpr):
    """From the best borders, or an even start, by Lloyd's steps to the centres; header and thresholds."""
    COUNT: tl.constexpr = 1 << BITS
    STEPS: tl.constexpr = 6 if BITS <= 4 else 32
    cells = tl.arange(0, COUNT)
    centres, borders = scratch + CENTRES, scratch + BORDERS
    if BITS <= 4:
        group_sums = scratch + GROUP_SUMS
        border = tl.zeros([], tl.int32) + GROUPS
        tl.store(borders + COUNT, border.to(tl.float64))
        for down in range(0, COUNT - 1):
            cell = COUNT - 1 - down
            border = tl.load(scratch + CHOICES + cell * 1024 + border, cache_modifier=".cg").to(tl.int32)
            tl.store(borders + cell, border.to(tl.float64))
        tl.store(borders, tl.zeros([], tl.float64))
        tl.debug_barrier()
        begin = tl.load(borders + cells, cache_modifier=".cg").to(tl.int32)
        end = tl.load(borders + cells + 1, cache_modifier=".cg").to(tl.int32)
        mass = tl.load(group_sums + end) - tl.load(group_sums + begin)
        first = tl.load(group_sums + 1024 + end) - tl.load(group_sums + 1024 + begin)
        # A cell without a value gets the place where its border is.
        place = tl.load(group_sums + begin)
        at = tl.minimum(_search(sums + 1, place, points, True), points - 1)
        centre_now = tl.where(mass > 0, first / tl.where(mass > 0, mass, 1.0), tl.load(values + at))
    else:
        wanted = (cells.to(tl.float64) + 0.5) * all_shares / COUNT
        at = tl.minimum(_search(sums + 3 * MOST_POINTS + 1, wanted, points, False), points - 1)
        centre_now = tl.load(values + at)
    for _ in range(STEPS):
        tl.store(centres + cells, centre_now)
        tl.debug_barrier()
        following = tl.load(centres + cells + 1, mask=cells + 1 < COUNT, other=float("inf"), cache_modifier=".cg")
        previous = tl.load(centres + cells - 1, mask=cells > 0, other=float("-inf"), cache_modifier=".cg")
        tl.debug_barrier()
        begin = tl.where(cells > 0, _search(values, (previous + centre_now) / 2, points, True), 0)
        end = tl.where(cells + 1 < COUNT, _search(values, (following + centre_now) / 2, points, True), points)
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
