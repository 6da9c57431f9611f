"""Sampling for order statistics: thresholds and uppers for the read, which almost certainly bracket each cut.

1. a sample of 2048 values is ranked by counting, every value against every other; every second one is a splitter
2. a sample of up to 524288 values is counted between the splitters: two of them enclose each cut
3. the brackets of all cuts, each computed by a program of its own, divide the values into intervals (for counting.py)

The bracket of a cut is the range above the lower of the two, up to and including the upper one. Its values are kept,
unless many are equal: such a value is an interval of its own, which is counted and not kept. There are two of them at
most, the upper end and the first splitter inside; a value that fewer elements share fits into the memory for kept
values.
"""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import bits_of, float_of, key_of, plain, sample_places, wait_for_all
from thinpipe.codecs.kernels.cuda.offsets import (
    ARRIVED_SAMPLING,
    BRACKETS,
    COPIES,
    CUTS,
    DRAWN,
    DRAWN_VALUES,
    FIRST_SHARED,
    HIGH,
    HIGH_SHARED,
    INTERVALS,
    SAMPLE_COUNTS,
    SPLITTER_VALUES,
    SPLITTERS,
    TABLE,
    THRESHOLDS,
    UPPERS,
)

LARGER = tl.constexpr(1 << 19)  # values of the larger sample, at most
LEAST = tl.constexpr(1 << 16)  # and at least, of tensors with four times as many
PART, SMALL_PART = 1 << 11, 1 << 10  # of it, at a time: one or two steps for each program
# Half a bracket's width, in standard deviations of a rank in the larger sample. Less than one in ten thousand cuts is
# not inside, and needs a search of all values; all others search a fifth less than with five deviations.
DEVIATIONS = tl.constexpr(4.0)


@triton.jit
def rank_of_cut(cut, small, larger):
    """Return the rank of the last value before a cut, as in thinpipe.codecs.layout.bucket_bounds."""
    cut = cut.to(tl.int64) + 1
    return tl.maximum(cut * small + tl.minimum(cut, larger) - 1, 0)


@triton.jit(do_not_specialize=["n", "small", "larger", "first_cut", "cuts"])
def thresholds_kernel(
    x, n, counters, scratch, small, larger, first_cut, cuts, MAGNITUDE: tl.constexpr, PART: tl.constexpr
):
    """Compute thresholds and uppers, and store them in the table."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED_SAMPLING
    drawn, splitters = scratch + DRAWN, scratch + SPLITTER_VALUES
    # A load of a random value takes as long as one of eight in a row: of small tensors a thirty-second is enough.
    size = tl.minimum(n // 4, tl.minimum(tl.maximum(n // 32, LEAST), LARGER)).to(tl.int32)
    _draw(x, n, drawn, MAGNITUDE)
    wait_for_all(arrived, programs)
    _rank(drawn, splitters)
    wait_for_all(arrived, 2 * programs)
    mine = counters + SAMPLE_COUNTS + (program % COPIES) * SPLITTERS
    _count_gaps(x, n, size, splitters, mine, MAGNITUDE, PART)
    wait_for_all(arrived, 3 * programs)
    for cut in range(program, cuts, programs):
        share = rank_of_cut(tl.cast(first_cut + cut, tl.int32), small, larger).to(tl.float64) / n
        _store_bracket(scratch + BRACKETS + cut, splitters, counters + SAMPLE_COUNTS, share, size)
    wait_for_all(arrived, 4 * programs)
    if program == 0:
        tl.store(counters + THRESHOLDS, _fill_table(scratch + TABLE, scratch + BRACKETS, cuts))


@triton.jit
def _draw(x, n, drawn, MAGNITUDE: tl.constexpr):
    """Store this program's part of the smaller sample."""
    MANY: tl.constexpr = 64
    for start in range(tl.program_id(0) * MANY, DRAWN_VALUES, tl.num_programs(0) * MANY):
        index = start + tl.arange(0, MANY)
        places = sample_places(index, tl.cast(n // DRAWN_VALUES, tl.int64))
        tl.store(drawn + index, plain(tl.load(x + places), MAGNITUDE))


@triton.jit
def _rank(drawn, splitters):
    """Rank a few values of the smaller sample, and store those that are splitters."""
    FEW: tl.constexpr = 8
    MANY: tl.constexpr = 512 if DRAWN_VALUES > 512 else DRAWN_VALUES
    for start in range(tl.program_id(0) * FEW, DRAWN_VALUES, tl.num_programs(0) * FEW):
        mine = start + tl.arange(0, FEW)
        values = tl.load(drawn + mine)
        before = tl.zeros([FEW, MANY], tl.int32)
        for other in range(0, DRAWN_VALUES, MANY):
            others = other + tl.arange(0, MANY)
            against = tl.load(drawn + others)
            tied = (against[None, :] == values[:, None]) & (others[None, :] < mine[:, None])
            before += ((against[None, :] < values[:, None]) | tied).to(tl.int32)
        rank = tl.sum(before, axis=1)
        tl.store(splitters + rank // 2, values, mask=rank % 2 == 1)


@triton.jit
def _count_gaps(x, n, size, splitters, counts, MAGNITUDE: tl.constexpr, PART: tl.constexpr):
    """Add this program's part of the larger sample to the histogram between the splitters."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    following = _load_sample(x, n, size, program, MAGNITUDE, PART)
    for part in range(program, tl.cdiv(size, PART), programs):
        values, there = following
        following = _load_sample(x, n, size, part + programs, MAGNITUDE, PART)
        counted = tl.histogram(_gap_of(values, splitters), SPLITTERS, mask=there)
        tl.atomic_add(counts + tl.arange(0, SPLITTERS), counted, mask=counted > 0, sem="relaxed")


@triton.jit
def _load_sample(x, n, size, part, MAGNITUDE: tl.constexpr, PART: tl.constexpr):
    index = part * PART + tl.arange(0, PART)
    places = sample_places(index, tl.cast(n // size, tl.int64))
    return plain(tl.load(x + places, mask=index < size, other=0.0), MAGNITUDE), index < size


@triton.jit
def _gap_of(values, splitters):
    """Return how many of all splitters but the last are below each value, by binary search."""
    index = tl.zeros(values.shape, tl.int32)
    half = SPLITTERS // 2
    # Shared memory serves 32 threads with different lines at once; the L1 cache serves one line at a time.
    every = tl.load(splitters + tl.arange(0, SPLITTERS))
    for _ in range(bits_of(SPLITTERS)):
        index += tl.where(values > tl.gather(every, index + (half - 1), 0), half, 0)
        half = half // 2
    return index


@triton.jit
def _store_bracket(bracket, splitters, counts, share, size):
    """Store the ends of a cut's bracket and its shared values, from the counts between splitters."""
    gaps = tl.arange(0, SPLITTERS)
    counted = tl.load(counts + tl.arange(0, COPIES)[:, None] * SPLITTERS + gaps[None, :])
    reached = tl.cumsum(tl.sum(counted, axis=0), axis=0)
    target = share * size
    deviation = tl.sqrt((target * (1 - share)).to(tl.float32)) * DEVIATIONS + 1
    least, most = tl.floor(target - deviation).to(tl.int32), tl.ceil(target + deviation).to(tl.int32)
    # The first splitter that is not certainly below the cut, and the first that is certainly not below it.
    inside = tl.sum((reached <= least).to(tl.int32), axis=0)
    last = tl.sum((reached < most).to(tl.int32), axis=0)
    first = _shared(splitters, inside)
    low = tl.load(splitters + inside - 1, mask=inside > 0, other=float("-inf"))
    low = tl.where((low == first) | (inside == 0) & (first == first), _before(first), low)  # a shared value is no end
    high = tl.load(splitters + last, mask=last < SPLITTERS - 1, other=float("inf"))
    tl.store(bracket, low)
    tl.store(bracket + HIGH, high)
    tl.store(bracket + FIRST_SHARED, first)
    tl.store(bracket + HIGH_SHARED, _shared(splitters, last))


@triton.jit
def _fill_table(table, brackets, cuts):
    """Compute the table from all brackets; return the number of thresholds."""
    cut = tl.arange(0, CUTS)
    there = cut < cuts
    low = tl.load(brackets + cut, mask=there, other=float("inf"))
    high = tl.load(brackets + HIGH + cut, mask=there, other=float("-inf"))
    first = tl.load(brackets + FIRST_SHARED + cut, mask=there, other=float("nan"))[:, None]
    last = tl.load(brackets + HIGH_SHARED + cut, mask=there, other=float("nan"))[:, None]
    kind = tl.arange(0, 8)[None, :]
    values = tl.where(kind == 0, low[:, None], tl.where(kind == 1, _before(first), first))
    values = tl.where(kind == 3, _before(last), tl.where(kind == 4, last, values))
    # A bracket that reaches down to the least value has no lower end; a value shared by few is NaN.
    wanted = (kind == 0) & (low > float("-inf"))[:, None] | ((kind == 1) | (kind == 2)) & (first == first)
    wanted = (wanted | ((kind == 3) | (kind == 4)) & (last == last)) & there[:, None]
    thresholds = _store_rising(table, tl.reshape(values, [8 * CUTS]), tl.reshape(wanted, [8 * CUTS]))
    _store_uppers(table, low, high)
    return thresholds


@triton.jit
def _shared(splitters, index):
    """Return a splitter if the next one is equal to it, so that many elements share the value; else NaN."""
    value = tl.load(splitters + index, mask=index < SPLITTERS - 2, other=float("nan"))
    following = tl.load(splitters + index + 1, mask=index < SPLITTERS - 2, other=0.0)
    return tl.where(value == following, value, float("nan"))


@triton.jit
def _before(values):
    """Return the greatest float below each value."""
    return float_of(key_of(values) - 1)


@triton.jit
def _store_rising(table, values, wanted):
    """Store the wanted values that are above all before them, padded with infinity.

    Returns their number, or -1 if there are too many. Brackets are in order: a value that is not above all before it
    lies in an interval that is kept, or shared, already.
    """
    index, lanes = tl.arange(0, 8 * CUTS), tl.arange(0, INTERVALS)
    tl.store(table + lanes, tl.full([INTERVALS], float("inf"), tl.float32))
    _, greatest = tl.associative_scan((tl.where(wanted, values, float("-inf")), index), 0, _first_greatest)
    wanted = wanted & (greatest == index)
    place = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    count = tl.sum(wanted.to(tl.int32), axis=0)
    count = tl.where(count < INTERVALS, count, -1)
    tl.debug_barrier()
    tl.store(table + place, values + 0.0, mask=wanted & (place < count))  # never -0, see negative
    tl.debug_barrier()
    return count


@triton.jit
def _first_greatest(value, index, other, other_index):
    above = other > value
    return tl.where(above, other, value), tl.where(above, other_index, index)


@triton.jit
def _store_uppers(table, low, high):
    """Store the upper of every interval: the greatest end of the brackets that reach down to its start."""
    lanes = tl.arange(0, INTERVALS)
    begin = tl.load(table + lanes - 1, mask=lanes > 0, other=float("-inf"))
    end = tl.load(table + lanes)
    reaches = low[None, :] <= begin[:, None]
    upper = tl.max(tl.where(reaches, high[None, :], float("-inf")), axis=1)
    one_value = key_of(end) - key_of(begin) == 1
    tl.store(table + UPPERS + lanes, tl.where(one_value, float("-inf"), upper))
    tl.debug_barrier()
