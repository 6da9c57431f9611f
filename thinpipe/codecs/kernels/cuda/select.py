"""Exact order statistics of a tensor in one launch, without sorting: up to three cuts of a tensor at a time.

    1. a sample of 4096 values is ranked by counting (every value against every other): 40 of them around each cut
    2. a sample of up to 524288 values is counted against those: two of the 40 almost certainly enclose the cut tightly
    3. the one read of the tensor: how many values reach up to each bracket, how many are equal to an end that many
       share (half of a ReLU's output is 0), the extent, and the few values strictly inside the brackets
    4. those few are counted by the leading bits of their keys, then by the next bits in the winning bin, and so on:
       the value at the wanted rank, exactly; the last look finds the value after it too
    5. if a bracket did not hold its cut, or held more than there was room for, step 4 takes the whole tensor: slower
       by far, and always right. Small tensors go there at once

All programs of the launch run at the same time and wait for each other between the steps, so that a tensor of any
size costs one launch and nothing is known to the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import (
    COLUMNS,
    ROWS,
    TILE,
    as_values,
    bucket_affine,
    float_of,
    key_of,
    load_values,
    negative,
    sample_places,
    store_bytes,
    wait_for_all,
)
from thinpipe.codecs.kernels.cuda.narrow import (
    NO_KEY,
    ROOM,
    collect,
    count_bins,
    load_kept,
    overflown,
    pick_bins,
    possible,
    rank_lists,
)

CUTS = tl.constexpr(3)  # at a time
SAMPLE = tl.constexpr(4096)
SPLITTERS = tl.constexpr(40)  # around each cut
LANES = tl.constexpr(128)  # of the splitters of all cuts; the last 8 idle
DEVIATIONS = tl.constexpr(4.0)  # half a bracket's width, in standard deviations of a rank in a sample
BINS = tl.constexpr(2048)
COPIES = tl.constexpr(8)  # of the counts, so that programs that meet the same value seldom wait for each other
MOST_PROGRAMS = tl.constexpr(512)

# Places in the counters, int32, all zero at the launch.
ARRIVED = tl.constexpr(0)
FAILED = tl.constexpr(1)
PICKED = tl.constexpr(16)  # of every cut: the wanted bins of its bracket, and the rank among their values
BELOW = tl.constexpr(128)  # values of the larger sample below each splitter
ABOVE = tl.constexpr(256)  # and above each
LENGTHS = tl.constexpr(384)  # of the lists of values in the wanted bins
BRACKET_COUNTS = tl.constexpr(640)
HISTOGRAM = tl.constexpr(640 + 4 * 512)
COUNTERS = 640 + 4 * 512 + 8 * 3 * 2048

# Places in the scratch memory, float32, not initialised. First what is int64: numbers found for each cut, partial sums.
FOUND = tl.constexpr(0)
PARTIALS = tl.constexpr(64)
EXTENTS = tl.constexpr(64 + 2 * 16 * 512)  # of every program: least, greatest, NaN if a value is not finite
SPLITTER_VALUES = tl.constexpr(64 + 35 * 512)
EDGES = tl.constexpr(64 + 35 * 512 + 128)  # first value of every chunk, then last value of every chunk
PARAMETERS = tl.constexpr(64 + 36 * 512 + 128)  # what encode_kernel wants for every chunk
DRAWN = tl.constexpr(64 + 38 * 512 + 128)  # the smaller sample, then the larger one, then the kept values
LISTS = tl.constexpr(3 * ROOM.value)  # of values around cuts, where the larger sample was

# Places in the numbers found for a cut, int64.
WORDS = tl.constexpr(8)
LOW_KEY = tl.constexpr(0)  # the value at the cut's rank has a key from here
HIGH_KEY = tl.constexpr(1)  # to here
RANK = tl.constexpr(2)  # of it among those
UP_TO = tl.constexpr(3)  # values of the tensor below LOW_KEY; in the end, up to the found value
DONE = tl.constexpr(4)
NEXT_KEY = tl.constexpr(5)  # of the least value above the found one
LISTED_KEY = tl.constexpr(6)  # of the value at the next rank, if it is in the cut's list

SUMS = tl.constexpr(16)  # partial sums of a program: counts above the lower ends of brackets; from 4, of ties


def larger_sample(n: int) -> int:
    """Values in the larger sample of n: a multiple of 16, or what lies behind it would not be aligned."""
    return min(1 << (19 if n >= 1 << 25 else 18), n // 64 * 16)


def slots_per_column(n: int, programs: int) -> int:
    """Room for kept values: for all of a small tensor, else for three times as many as expected."""
    most = (n // TILE.value // programs + 2) * ROWS.value
    return min(most, 96 + most // 10)


def scratch_floats(n: int, programs: int, sampled: bool) -> int:
    kept = (
        max(larger_sample(n), LISTS.value) + slots_per_column(n, programs) * COLUMNS.value * programs if sampled else 0
    )
    return DRAWN.value + SAMPLE.value + kept


@triton.jit
def _places_around(rank, n, lane):
    """Where in the ranked sample the splitters of a cut are: dense where it is expected, sparse at the ends."""
    share = rank.to(tl.float64) / n
    deviation = tl.sqrt(share * (1 - share) * SAMPLE) * DEVIATIONS + 2
    middle: tl.constexpr = (SPLITTERS - 1) / 2
    side = (lane - middle) / middle
    return tl.floor(share * SAMPLE + side * tl.abs(side) * deviation).to(tl.int32)


@triton.jit
def _load_drawn(x, n, size, index):
    """Values of a sample as they are in the tensor, those beyond it anything."""
    return tl.load(x + sample_places(index, tl.cast(n // size, tl.int64)), mask=index < size)


@triton.jit
def _draw(x, n, size, drawn, begin, MAGNITUDE: tl.constexpr):
    """Every program draws a part of a sample, from some value of it on."""
    MANY: tl.constexpr = 1024
    for start in range(begin + tl.program_id(0) * MANY, size, tl.num_programs(0) * MANY):
        index = start + tl.arange(0, MANY)
        tl.store(drawn + index, as_values(_load_drawn(x, n, size, index), MAGNITUDE), mask=index < size)


@triton.jit
def _draw_and_rank(x, n, size, drawn, splitters, rank0, rank1, rank2, MAGNITUDE: tl.constexpr):
    """Most of the larger sample is under way while the smaller one is ranked: nothing may touch it before."""
    MANY: tl.constexpr = 1024
    index = tl.program_id(0) * MANY + tl.arange(0, MANY)
    further = index + tl.num_programs(0) * MANY
    loaded = _load_drawn(x, n, size, index)
    further_loaded = _load_drawn(x, n, size, further)
    _rank_sample(drawn, splitters, n, rank0, rank1, rank2)
    larger = drawn + SAMPLE
    tl.store(larger + index, as_values(loaded, MAGNITUDE), mask=index < size)
    tl.store(larger + further, as_values(further_loaded, MAGNITUDE), mask=further < size)
    _draw(x, n, size, larger, 2 * tl.num_programs(0) * MANY, MAGNITUDE)


@triton.jit
def _rank_sample(drawn, splitters, n, rank0, rank1, rank2):
    """Every program ranks a few values of the smaller sample and stores those that are splitters."""
    FEW: tl.constexpr = 16
    MANY: tl.constexpr = 256
    lanes = tl.arange(0, LANES)
    cut = lanes // SPLITTERS
    rank = tl.where(cut == 0, rank0, tl.where(cut == 1, rank1, rank2))
    wanted = tl.where(cut < CUTS, _places_around(rank, n, lanes % SPLITTERS), -1)
    for start in range(tl.program_id(0) * FEW, SAMPLE, tl.num_programs(0) * FEW):
        mine = start + tl.arange(0, FEW)
        values = tl.load(drawn + mine, cache_modifier=".cg")
        before = tl.zeros([FEW, MANY], tl.int32)
        for other in range(0, SAMPLE, MANY):
            others = other + tl.arange(0, MANY)
            against = tl.load(drawn + others, cache_modifier=".cg")
            less = against[None, :] < values[:, None]
            tied = (against[None, :] == values[:, None]) & (others[None, :] < mine[:, None])
            before += (less | tied).to(tl.int32)
        found = tl.sum(before, axis=1)[:, None] == wanted[None, :]
        tl.store(splitters + tl.broadcast_to(lanes[None, :], [FEW, LANES]), values[:, None] + tl.zeros([FEW, LANES], tl.float32), mask=found)  # fmt: skip


@triton.jit
def _any_tied(splitters):
    """Whether two neighbouring splitters of a cut are equal: then a part of all values is one value."""
    lanes = tl.arange(0, LANES)
    mine = lanes < CUTS * SPLITTERS
    values = tl.load(splitters + lanes, mask=mine, other=0.0, cache_modifier=".cg")
    following = tl.load(splitters + lanes + 1, mask=mine & (lanes % SPLITTERS < SPLITTERS - 1), cache_modifier=".cg", other=float("nan"))  # fmt: skip
    return tl.max((values == following).to(tl.int32), axis=0) > 0


@triton.jit
def _count_sample(drawn, size, splitters, counters):
    """Every program counts a part of the larger sample against the splitters of all cuts."""
    if _any_tied(splitters):
        _count_part(drawn, size, splitters, counters, True)
    else:
        _count_part(drawn, size, splitters, counters, False)


@triton.jit
def _count_part(drawn, size, splitters, counters, BOTH: tl.constexpr):
    """How many values are below each splitter; BOTH: and how many above, which without ties are all the others."""
    MANY: tl.constexpr = 32
    AHEAD: tl.constexpr = 4  # loads at a time: one after the other they would take longer than the counting
    lanes = tl.arange(0, LANES)
    values = tl.load(splitters + lanes, cache_modifier=".cg") + 0.0  # never -0: signs of differences are counted
    below = tl.zeros([LANES, MANY], tl.int32)
    above = tl.zeros([LANES, MANY], tl.int32)
    for start in range(tl.program_id(0) * (MANY * AHEAD), size, tl.num_programs(0) * (MANY * AHEAD)):
        others = start + tl.arange(0, MANY)
        against0 = tl.load(drawn + others, mask=others < size, other=float("nan"), cache_modifier=".cg")
        against1 = tl.load(drawn + others + MANY, mask=others + MANY < size, other=float("nan"), cache_modifier=".cg")
        against2 = tl.load(
            drawn + others + 2 * MANY, mask=others + 2 * MANY < size, other=float("nan"), cache_modifier=".cg"
        )
        against3 = tl.load(
            drawn + others + 3 * MANY, mask=others + 3 * MANY < size, other=float("nan"), cache_modifier=".cg"
        )
        below += negative(against0[None, :] - values[:, None]) + negative(against1[None, :] - values[:, None])
        below += negative(against2[None, :] - values[:, None]) + negative(against3[None, :] - values[:, None])
        if BOTH:
            above += negative(values[:, None] - against0[None, :]) + negative(values[:, None] - against1[None, :])
            above += negative(values[:, None] - against2[None, :]) + negative(values[:, None] - against3[None, :])
    tl.atomic_add(counters + BELOW + lanes, tl.sum(below, axis=1), sem="relaxed")
    if BOTH:
        tl.atomic_add(counters + ABOVE + lanes, tl.sum(above, axis=1), sem="relaxed")


@triton.jit
def _bracket(splitters, counters, size, n, rank, CUT: tl.constexpr):
    """Two values that almost certainly enclose a cut, and whether many values are equal to one of them."""
    lanes = tl.arange(0, 64)
    mine = lanes < SPLITTERS
    places = _places_around(rank, n, lanes)
    values = tl.load(splitters + CUT * SPLITTERS + lanes, mask=mine, other=0.0, cache_modifier=".cg")
    below = tl.load(counters + BELOW + CUT * SPLITTERS + lanes, mask=mine, other=0, cache_modifier=".cg")
    above = tl.load(counters + ABOVE + CUT * SPLITTERS + lanes, mask=mine, other=0, cache_modifier=".cg")
    upto = tl.where(_any_tied(splitters), size - above, below)
    share = rank.to(tl.float64) / n
    target = share * size
    deviation = tl.sqrt(target * (1 - share)) * DEVIATIONS + 1
    real = mine & (places >= 0) & (places < SAMPLE)
    under = real & (below <= target - deviation)
    over = real & (upto >= target + deviation)
    low = tl.max(tl.where(under, values, float("-inf")), axis=0) + 0.0  # never -0: the sign of a difference counts
    high = tl.min(tl.where(over, values, float("inf")), axis=0) + 0.0
    shared = upto > below + 2
    low_shared = tl.max((shared & under & (values == low)).to(tl.int32), axis=0)
    high_shared = tl.max((shared & over & (values == high)).to(tl.int32), axis=0)
    return low, high, low_shared != 0, high_shared != 0


@triton.jit
def _add_tie(tie, count, value, shared):
    """Take note of a value that many share: the first one is kept, a different one makes the count 2."""
    count = tl.where(shared & (count == 1) & (value != tie), 2, count)
    tie = tl.where(shared & (count == 0), value, tie)
    return tie, tl.where(shared & (count == 0), 1, count)


@triton.jit
def _read_values(
    values, there, columns, held, low, high, above0, above1, above2, tie0, tie1, tie2, tie3, tie4, tie5,
    lo0, hi0, lo1, hi1, lo2, hi2, lo_tie, hi_tie,
    CUTS_HERE: tl.constexpr, TIES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One value for every column: extent, counts, and if it is inside a bracket, to the column's next free slot.

    Comparisons are signs of differences, which cost half as much to count and to combine. Once a value is NaN, so is
    the extent.
    """
    if MASKED:
        low = tl.minimum(low, tl.where(there, values, float("inf")), propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, tl.where(there, values, float("-inf")), propagate_nan=tl.PropagateNan.ALL)
        values = tl.where(there, values, 0.0)
    else:
        low = tl.minimum(low, values, propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, values, propagate_nan=tl.PropagateNan.ALL)
    if CUTS_HERE > 0:
        above = _difference(lo0, values, there, MASKED)
        above0 += negative(above)
        inside = above & _difference(values, hi0, there, MASKED)
        if CUTS_HERE > 1:
            above = _difference(lo1, values, there, MASKED)
            above1 += negative(above)
            inside |= above & _difference(values, hi1, there, MASKED)
        if CUTS_HERE > 2:
            above = _difference(lo2, values, there, MASKED)
            above2 += negative(above)
            inside |= above & _difference(values, hi2, there, MASKED)
        if TIES == 2:
            tie0 += negative(_difference(values, lo_tie, there, MASKED))
            tie1 += negative(_difference(hi_tie, values, there, MASKED))
        if TIES == 6:
            tie0 += negative(_difference(values, lo0, there, MASKED))
            tie1 += negative(_difference(hi0, values, there, MASKED))
            tie2 += negative(_difference(values, lo1, there, MASKED))
            tie3 += negative(_difference(hi1, values, there, MASKED))
            tie4 += negative(_difference(values, lo2, there, MASKED))
            tie5 += negative(_difference(hi2, values, there, MASKED))
        tl.store(columns + held * COLUMNS, values, mask=inside < 0)
        held += negative(inside)
    return held, low, high, above0, above1, above2, tie0, tie1, tie2, tie3, tie4, tie5


@triton.jit
def _read_quarter(
    values, columns, held, low, high, above0, above1, above2, tie0, tie1, tie2, tie3, tie4, tie5,
    lo0, hi0, lo1, hi1, lo2, hi2, lo_tie, hi_tie, CUTS_HERE: tl.constexpr, TIES: tl.constexpr,
):  # fmt: skip
    """Four values for every column, which a thread has loaded at once."""
    pairs = tl.reshape(values, [COLUMNS, 2, 2])
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    for part in tl.static_range(4):
        held, low, high, above0, above1, above2, tie0, tie1, tie2, tie3, tie4, tie5 = _read_values(
            first if part == 0 else second if part == 1 else third if part == 2 else fourth,
            None, columns, held, low, high, above0, above1, above2, tie0, tie1, tie2, tie3, tie4, tie5,
            lo0, hi0, lo1, hi1, lo2, hi2, lo_tie, hi_tie, CUTS_HERE, TIES, False,
        )  # fmt: skip
    return held, low, high, above0, above1, above2, tie0, tie1, tie2, tie3, tie4, tie5


@triton.jit
def _difference(a, b, there, MASKED: tl.constexpr):
    """The bits of a - b: the highest says whether a is below b. 0 where there is no value."""
    bits = (a - b).to(tl.int32, bitcast=True)
    if MASKED:
        bits = tl.where(there, bits, 0)
    return bits


@triton.jit
def _load_quarter(x, tile, quarter: tl.constexpr, MAGNITUDE: tl.constexpr):
    """A quarter of a whole tile. Places are rotated, or a channel full of kept values would fill one column."""
    MANY: tl.constexpr = TILE // 4
    rotation = ((tile * 40503) >> 3) & (MANY - 8)
    places = (tl.arange(0, MANY) + rotation) & (MANY - 1)
    places = tl.max_contiguous(tl.multiple_of(places, 8), 8) + quarter * MANY
    return load_values(x + tl.cast(tile, tl.int64) * TILE, places, None, MAGNITUDE)


@triton.jit
def read(
    x, n, store, room, partials, extents, lo0, hi0, lo1, hi1, lo2, hi2, lo_tie, hi_tie,
    CUTS_HERE: tl.constexpr, TIES: tl.constexpr, MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """This program's part of the tensor: stores its counts and extent, returns how full each column is, and losses."""
    held = tl.zeros([COLUMNS], tl.int32)
    lost = tl.zeros([COLUMNS], tl.int32)
    low = tl.full([COLUMNS], float("inf"), tl.float32)
    high = tl.full([COLUMNS], float("-inf"), tl.float32)
    above0 = tl.zeros([COLUMNS], tl.int32)
    above1 = tl.zeros([COLUMNS], tl.int32)
    above2 = tl.zeros([COLUMNS], tl.int32)
    tie0 = tl.zeros([COLUMNS], tl.int32)
    tie1 = tl.zeros([COLUMNS], tl.int32)
    tie2 = tl.zeros([COLUMNS], tl.int32)
    tie3 = tl.zeros([COLUMNS], tl.int32)
    tie4 = tl.zeros([COLUMNS], tl.int32)
    tie5 = tl.zeros([COLUMNS], tl.int32)
    columns = store + tl.arange(0, COLUMNS)
    program = tl.program_id(0)
    tiles = tl.cast(n // TILE, tl.int32)
    if program < tiles:
        # A tile is under way while the one before it is counted.
        next0 = _load_quarter(x, program, 0, MAGNITUDE)
        next1 = _load_quarter(x, program, 1, MAGNITUDE)
        next2 = _load_quarter(x, program, 2, MAGNITUDE)
        next3 = _load_quarter(x, program, 3, MAGNITUDE)
        for tile in range(program, tiles, tl.num_programs(0)):
            values0, values1, values2, values3 = next0, next1, next2, next3
            ahead = tl.minimum(tile + tl.num_programs(0), tiles - 1)
            next0 = _load_quarter(x, ahead, 0, MAGNITUDE)
            next1 = _load_quarter(x, ahead, 1, MAGNITUDE)
            next2 = _load_quarter(x, ahead, 2, MAGNITUDE)
            next3 = _load_quarter(x, ahead, 3, MAGNITUDE)
            # A column that might overflow starts anew, and what it held is lost.
            full = held > room - ROWS
            lost |= full.to(tl.int32)
            held = tl.where(full, 0, held)
            for quarter in tl.static_range(4):
                held, low, high, above0, above1, above2, tie0, tie1, tie2, tie3, tie4, tie5 = _read_quarter(
                    values0 if quarter == 0 else values1 if quarter == 1 else values2 if quarter == 2 else values3,
                    columns, held, low, high, above0, above1, above2, tie0, tie1, tie2, tie3, tie4, tie5,
                    lo0, hi0, lo1, hi1, lo2, hi2, lo_tie, hi_tie, CUTS_HERE, TIES,
                )  # fmt: skip
    if tiles % tl.num_programs(0) == program:
        full = held > room - ROWS
        lost |= full.to(tl.int32)
        held = tl.where(full, 0, held)
        for start in range(tl.cast(tiles, tl.int64) * TILE, n, COLUMNS):
            places = start + tl.arange(0, COLUMNS)
            values = load_values(x, places, places < n, MAGNITUDE)
            held, low, high, above0, above1, above2, tie0, tie1, tie2, tie3, tie4, tie5 = _read_values(
                values, places < n, columns, held, low, high, above0, above1, above2,
                tie0, tie1, tie2, tie3, tie4, tie5, lo0, hi0, lo1, hi1, lo2, hi2, lo_tie, hi_tie,
                CUTS_HERE, TIES, True,
            )  # fmt: skip
    untouched = (low == float("inf")) & (high == float("-inf"))
    tl.store(extents + program, tl.min(low, axis=0))
    tl.store(extents + MOST_PROGRAMS + program, tl.max(high, axis=0))
    tl.store(extents + 2 * MOST_PROGRAMS + program, tl.sum(tl.where(untouched, 0.0, low * 0.0 + high * 0.0), axis=0))
    mine = partials + SUMS * program
    if CUTS_HERE > 0:
        tl.store(mine + 0, tl.sum(above0.to(tl.int64), axis=0))
        tl.store(mine + 1, tl.sum(above1.to(tl.int64), axis=0))
        tl.store(mine + 2, tl.sum(above2.to(tl.int64), axis=0))
    if TIES > 0:
        tl.store(mine + 4, tl.sum(tie0.to(tl.int64), axis=0))
        tl.store(mine + 5, tl.sum(tie1.to(tl.int64), axis=0))
    if TIES > 2:
        tl.store(mine + 6, tl.sum(tie2.to(tl.int64), axis=0))
        tl.store(mine + 7, tl.sum(tie3.to(tl.int64), axis=0))
        tl.store(mine + 8, tl.sum(tie4.to(tl.int64), axis=0))
        tl.store(mine + 9, tl.sum(tie5.to(tl.int64), axis=0))
    return held, lost


@triton.jit
def _total(partials, which):
    programs = tl.arange(0, MOST_PROGRAMS)
    parts = tl.load(
        partials + SUMS * programs + which, mask=programs < tl.num_programs(0), other=0, cache_modifier=".cg"
    )
    return tl.sum(parts, axis=0)


@triton.jit
def _begin(counters, row, partials, n, rank, low, high, ties, lo_tie, cut):
    """From the counts of the whole tensor: a cut is at its bracket's lower end, or inside."""
    upto = n - _total(partials, cut)
    below = upto
    if (ties > 2) | ((ties > 0) & (low == lo_tie)):
        below = _total(partials, tl.where(ties > 2, 4 + 2 * cut, 4))
    is_low = rank < upto
    if rank < below:
        tl.store(counters + FAILED, 1)
    key = key_of(low).to(tl.int64)
    tl.store(row + LOW_KEY, tl.where(is_low, key, key + 1))
    tl.store(row + HIGH_KEY, tl.where(is_low, key, key_of(high).to(tl.int64) - 1))
    tl.store(row + RANK, rank - upto)
    tl.store(row + UP_TO, upto)
    tl.store(row + DONE, is_low.to(tl.int64))
    tl.store(row + NEXT_KEY, key_of(high).to(tl.int64))


@triton.jit
def _begin_with_all(row, rank):
    """The cut is anywhere among all keys."""
    tl.store(row + LOW_KEY, tl.full([], -0x80000000, tl.int64))
    tl.store(row + HIGH_KEY, tl.full([], 0x7FFFFFFF, tl.int64))
    tl.store(row + RANK, rank)
    tl.store(row + UP_TO, tl.zeros([], tl.int64))
    tl.store(row + DONE, tl.zeros([], tl.int64))
    tl.store(row + NEXT_KEY, tl.full([], 0x7FFFFFFF, tl.int64))


@triton.jit
def _shift(low, high):
    """How many bits to leave out so that the keys from low to high fall into BINS bins."""
    shift = tl.zeros([], tl.int64)
    while ((high - low) >> shift) >= BINS:
        shift += 1
    return shift


@triton.jit
def _window(found, cut, CUTS_HERE: tl.constexpr):
    """The keys a cut is now among: the first, the last, bits to leave out of the distance; and what to do with them.

    ``count`` them, if the cut is not done; they are the last ones, and the ``next`` key above them is wanted, if they
    are not to be narrowed any more. In the end that is so for all cuts at once.
    """
    row = found + (cut % CUTS_HERE) * WORDS
    low = tl.load(row + LOW_KEY, cache_modifier=".cg")
    high = tl.load(row + HIGH_KEY, cache_modifier=".cg")
    done = (tl.load(row + DONE, cache_modifier=".cg") != 0) | (cut >= CUTS_HERE)
    shift = _shift(low, high)
    return low.to(tl.int32), high.to(tl.int32), shift.to(tl.uint32), ~done & (low <= high), done | (shift == 0)


@triton.jit
def _bins_of(keys, low, high, shift, count):
    """The bins of keys in a window, and which keys are in it."""
    distance = (keys - low).to(tl.uint32, bitcast=True)
    return (distance >> shift).to(tl.int32), count & (distance <= (high - low).to(tl.uint32, bitcast=True))


@triton.jit
def _least_above(least, keys, there, high):
    """The least key above a window, of every column."""
    return tl.minimum(least, tl.min(tl.where(there & (keys > high), keys, 0x7FFFFFFF), axis=0))


@triton.jit
def _offer_next(found, cut, least, next):
    if next:
        tl.atomic_min(found + cut * WORDS + NEXT_KEY, tl.min(least, axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def _pick_bin(counters, row, cut):
    """Narrow a cut's keys to the bin that its rank falls into; False if the rank lies beyond them."""
    bins = tl.arange(0, BINS)
    low = tl.load(row + LOW_KEY, cache_modifier=".cg")
    high = tl.load(row + HIGH_KEY, cache_modifier=".cg")
    rank = tl.load(row + RANK, cache_modifier=".cg")
    upto = tl.load(row + UP_TO, cache_modifier=".cg")
    population = tl.zeros([BINS], tl.int32)
    for copy in tl.static_range(COPIES):
        counts = counters + HISTOGRAM + (copy * CUTS + cut) * BINS + bins
        population += tl.load(counts, cache_modifier=".cg")
        tl.store(counts, tl.zeros([BINS], tl.int32))  # for the next bits
    reached = tl.cumsum(population.to(tl.int64), axis=0)
    picked = tl.sum((reached <= rank).to(tl.int32), axis=0)
    passed = tl.max(tl.where(bins < picked, reached, 0), axis=0)
    shift = _shift(low, high)
    last = shift == 0
    if last:
        passed_all = tl.max(tl.where(bins <= picked, reached, 0), axis=0)
        tl.store(row + UP_TO, upto + passed_all)
        following = tl.min(tl.where((bins > picked) & (population > 0), bins, BINS), axis=0)
        beyond = tl.load(row + NEXT_KEY, cache_modifier=".cg")
        tl.store(row + NEXT_KEY, tl.where(following < BINS, low + following, beyond))
    else:
        tl.store(row + UP_TO, upto + passed)
    start = low + (picked.to(tl.int64) << shift)
    tl.store(row + LOW_KEY, start)
    tl.store(row + HIGH_KEY, tl.minimum(start + (tl.full([], 1, tl.int64) << shift) - 1, high))
    tl.store(row + RANK, rank - passed)
    tl.store(row + DONE, last.to(tl.int64))
    return picked < BINS


@triton.jit
def _take_high_end(counters, row, partials, n, rank, high, ties, hi_tie, cut):
    """The rank lies beyond a bracket's inside: at its upper end if enough values are equal to that, or it failed."""
    upto = tl.load(row + UP_TO, cache_modifier=".cg")
    if (ties > 2) | ((ties > 0) & (high == hi_tie)):
        upto = n - _total(partials, tl.where(ties > 2, 5 + 2 * cut, 5))
    if rank + 1 >= upto:  # the value after it must be known too
        tl.store(counters + FAILED, 1)
    tl.store(row + LOW_KEY, key_of(high).to(tl.int64))
    tl.store(row + UP_TO, upto)
    tl.store(row + DONE, tl.full([], 1, tl.int64))


@triton.jit
def _all_done(found, CUTS_HERE: tl.constexpr):
    done = tl.full([], 1, tl.int64)
    for cut in tl.static_range(CUTS_HERE):
        done = done & tl.load(found + cut * WORDS + DONE, cache_modifier=".cg")
    return done


@triton.jit
def _load_tile(x, n, tile, MAGNITUDE: tl.constexpr):
    places = tl.cast(tile, tl.int64) * TILE + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = places < n
    return load_values(x, places, there, MAGNITUDE), there


@triton.jit
def load_part(x, n, store, held, part, KEPT: tl.constexpr, MAGNITUDE: tl.constexpr):
    """A part of what is searched: of the kept values, or of the whole tensor."""
    if KEPT:
        return load_kept(store, held, part * ROWS)
    else:
        return _load_tile(x, n, tl.program_id(0) + part * tl.num_programs(0), MAGNITUDE)


@triton.jit
def parts(n, slots, KEPT: tl.constexpr):
    if KEPT:
        return tl.cdiv(slots, ROWS)
    else:
        return tl.cast(tl.cdiv(tl.cdiv(n, TILE), tl.num_programs(0)), tl.int32)


@triton.jit
def _count_all(
    x, n, store, held, slots, counters, found, CUTS_HERE: tl.constexpr, KEPT: tl.constexpr, MAGNITUDE: tl.constexpr
):
    """This program's keys, counted for every cut that is not done, and the least of them above each last window."""
    low0, high0, shift0, count0, next0 = _window(found, 0, CUTS_HERE)
    low1, high1, shift1, count1, next1 = _window(found, 1, CUTS_HERE)
    low2, high2, shift2, count2, next2 = _window(found, 2, CUTS_HERE)
    # A key is as a rule in one window at most, and counting it once is cheaper than asking for every cut.
    apart = ~(count0 & count1 & (high0 >= low1)) & ~(count1 & count2 & (high1 >= low2))
    if apart & ~(count0 & count2 & (high0 >= low2)):
        _count_windows(
            x, n, store, held, slots, counters, low0, high0, shift0, count0, low1, high1, shift1, count1,
            low2, high2, shift2, count2, CUTS_HERE, True, KEPT, MAGNITUDE,
        )  # fmt: skip
    else:
        _count_windows(
            x, n, store, held, slots, counters, low0, high0, shift0, count0, low1, high1, shift1, count1,
            low2, high2, shift2, count2, CUTS_HERE, False, KEPT, MAGNITUDE,
        )  # fmt: skip
    if next0 & next1 & next2:
        least0 = tl.full([COLUMNS], 0x7FFFFFFF, tl.int32)
        least1 = tl.full([COLUMNS], 0x7FFFFFFF, tl.int32)
        least2 = tl.full([COLUMNS], 0x7FFFFFFF, tl.int32)
        for part in range(0, parts(n, slots, KEPT)):
            values, there = load_part(x, n, store, held, part, KEPT, MAGNITUDE)
            keys = key_of(values)
            least0 = _least_above(least0, keys, there, high0)
            if CUTS_HERE > 1:
                least1 = _least_above(least1, keys, there, high1)
            if CUTS_HERE > 2:
                least2 = _least_above(least2, keys, there, high2)
        _offer_next(found, 0, least0, next0)
        if CUTS_HERE > 1:
            _offer_next(found, 1, least1, next1)
        if CUTS_HERE > 2:
            _offer_next(found, 2, least2, next2)


@triton.jit
def _count_windows(
    x, n, store, held, slots, counters, low0, high0, shift0, count0, low1, high1, shift1, count1,
    low2, high2, shift2, count2,
    CUTS_HERE: tl.constexpr, APART: tl.constexpr, KEPT: tl.constexpr, MAGNITUDE: tl.constexpr,
):  # fmt: skip
    counts = counters + HISTOGRAM + (tl.program_id(0) % COPIES) * (CUTS * BINS)
    for part in range(0, parts(n, slots, KEPT)):
        values, there = load_part(x, n, store, held, part, KEPT, MAGNITUDE)
        keys = key_of(values)
        bins, inside = _bins_of(keys, low0, high0, shift0, count0)
        if CUTS_HERE > 1:
            bins1, inside1 = _bins_of(keys, low1, high1, shift1, count1)
            if APART:
                bins = tl.where(inside1, bins1 + BINS, bins)
                inside |= inside1
            else:
                tl.atomic_add(counts + BINS + bins1, 1, mask=there & inside1, sem="relaxed")
        if CUTS_HERE > 2:
            bins2, inside2 = _bins_of(keys, low2, high2, shift2, count2)
            if APART:
                bins = tl.where(inside2, bins2 + 2 * BINS, bins)
                inside |= inside2
            else:
                tl.atomic_add(counts + 2 * BINS + bins2, 1, mask=there & inside2, sem="relaxed")
        tl.atomic_add(counts + bins, 1, mask=there & inside, sem="relaxed")


@triton.jit
def _of_cut(cut, of0, of1, of2):
    return tl.where(cut == 0, of0, tl.where(cut == 1, of1, of2))


@triton.jit(do_not_specialize=["n", "rank0", "rank1", "rank2", "first_cut", "levels", "room"])
def select_kernel(
    x, n, wire, counters, scratch, rank0, rank1, rank2, first_cut, levels, size, room,
    CUTS_HERE: tl.constexpr, CHUNKS: tl.constexpr, LAST: tl.constexpr, SAMPLED: tl.constexpr, MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """The values at up to three ranks and those after them, into the edges; the last launch of a tensor finishes."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED
    arrivals = programs
    found = (scratch + FOUND).to(tl.pointer_type(tl.int64))
    partials = (scratch + PARTIALS).to(tl.pointer_type(tl.int64))
    extents = scratch + EXTENTS
    if SAMPLED:
        drawn = scratch + DRAWN
        splitters = scratch + SPLITTER_VALUES
        store = drawn + SAMPLE + tl.maximum(size, LISTS) + program.to(tl.int64) * room * COLUMNS
        _draw(x, n, SAMPLE, drawn, 0, MAGNITUDE)
        wait_for_all(arrived, arrivals)
        _draw_and_rank(x, n, size, drawn, splitters, rank0, rank1, rank2, MAGNITUDE)
        wait_for_all(arrived, arrivals + programs)
        _count_sample(drawn + SAMPLE, size, splitters, counters)
        wait_for_all(arrived, arrivals + 2 * programs)
        arrivals += 3 * programs
        lo0, hi0, lo0_shared, hi0_shared = _bracket(splitters, counters, size, n, rank0, 0)
        lo1, hi1, lo1_shared, hi1_shared = _bracket(splitters, counters, size, n, rank1, 1)
        lo2, hi2, lo2_shared, hi2_shared = _bracket(splitters, counters, size, n, rank2, 2)
        # One lower and one upper end that many values share are counted apart; if there are more, all ends are.
        lo_tie, lo_ties = _add_tie(lo0, 0, lo0, lo0_shared)
        lo_tie, lo_ties = _add_tie(lo_tie, lo_ties, lo1, lo1_shared)
        lo_tie, lo_ties = _add_tie(lo_tie, lo_ties, lo2, lo2_shared)
        hi_tie, hi_ties = _add_tie(hi0, 0, hi0, hi0_shared & (hi0 != lo0))
        hi_tie, hi_ties = _add_tie(hi_tie, hi_ties, hi1, hi1_shared & (hi1 != lo1))
        hi_tie, hi_ties = _add_tie(hi_tie, hi_ties, hi2, hi2_shared & (hi2 != lo2))
        ties = tl.where((lo_ties > 1) | (hi_ties > 1), 3, lo_ties + hi_ties)
        if ties == 0:
            held, lost = read(
                x, n, store, room, partials, extents, lo0, hi0, lo1, hi1, lo2, hi2, lo_tie, hi_tie,
                CUTS_HERE, 0, MAGNITUDE,
            )  # fmt: skip
        elif ties < 3:
            held, lost = read(
                x, n, store, room, partials, extents, lo0, hi0, lo1, hi1, lo2, hi2, lo_tie, hi_tie,
                CUTS_HERE, 2, MAGNITUDE,
            )  # fmt: skip
        else:
            held, lost = read(
                x, n, store, room, partials, extents, lo0, hi0, lo1, hi1, lo2, hi2, lo_tie, hi_tie,
                CUTS_HERE, 6, MAGNITUDE,
            )  # fmt: skip
        slots = tl.max(held, axis=0)
        if tl.max(lost, axis=0) > 0:
            tl.store(counters + FAILED, 1)
        quick = possible(lo0, hi0, lo1, hi1, lo2, hi2, CUTS_HERE)
        picked, lengths = counters + PICKED, counters + LENGTHS
        lists = drawn + SAMPLE  # where the larger sample was
        if quick:
            tl.debug_barrier()  # what other threads of this program have kept
            count_bins(store, held, slots, counters + BRACKET_COUNTS, lo0, hi0, lo1, hi1, lo2, hi2, CUTS_HERE)
        wait_for_all(arrived, arrivals)
        for cut in range(program, CUTS_HERE, programs):
            row = found + cut * WORDS
            rank = _of_cut(cut, rank0, rank1, rank2)
            low, high = _of_cut(cut, lo0, lo1, lo2), _of_cut(cut, hi0, hi1, hi2)
            _begin(counters, row, partials, n, rank, low, high, ties, lo_tie, cut)
            if quick:
                tl.store(row + LISTED_KEY, tl.full([], NO_KEY, tl.int64))
                tl.debug_barrier()
                among = tl.load(row + RANK, cache_modifier=".cg")
                if pick_bins(counters + BRACKET_COUNTS, picked, among, cut) <= among:
                    _take_high_end(counters, row, partials, n, rank, high, ties, hi_tie, cut)
        wait_for_all(arrived, arrivals + programs)
        arrivals += 2 * programs
        if quick:
            collect(store, held, slots, picked, lengths, lists, lo0, hi0, lo1, hi1, lo2, hi2, CUTS_HERE)
            wait_for_all(arrived, arrivals)
            arrivals += programs
            quick = ~overflown(lengths, CUTS_HERE)
        failed = tl.load(counters + FAILED, cache_modifier=".cg")
        quick = quick & (failed == 0)
        if quick:
            rank_lists(picked, lengths, lists, found + LOW_KEY, found + LISTED_KEY, WORDS, CUTS_HERE)
            wait_for_all(arrived, arrivals)
            arrivals += programs
        again = ~quick & (failed == 0)  # once in any case: the value after the found one is wanted too
        while again:
            _count_all(x, n, store, held, slots, counters, found, CUTS_HERE, True, MAGNITUDE)
            wait_for_all(arrived, arrivals)
            for cut in range(program, CUTS_HERE, programs):
                row = found + cut * WORDS
                if tl.load(row + DONE, cache_modifier=".cg") == 0:
                    if _pick_bin(counters, row, cut) == 0:
                        rank = _of_cut(cut, rank0, rank1, rank2)
                        high = _of_cut(cut, hi0, hi1, hi2)
                        _take_high_end(counters, row, partials, n, rank, high, ties, hi_tie, cut)
            wait_for_all(arrived, arrivals + programs)
            arrivals += 2 * programs
            failed = tl.load(counters + FAILED, cache_modifier=".cg")
            again = (failed == 0) & (_all_done(found, CUTS_HERE) == 0)
    else:
        nan = float("nan")
        read(x, n, scratch, 0, partials, extents, nan, nan, nan, nan, nan, nan, nan, nan, 0, 0, MAGNITUDE)  # fmt: skip
        wait_for_all(arrived, arrivals)
        arrivals += programs
        failed = 1
        quick = False
    if CUTS_HERE > 0:
        if failed != 0:
            _search_everything(x, n, counters, found, arrivals, rank0, rank1, rank2, CUTS_HERE, MAGNITUDE)
    if program == 0:
        _store_edges(scratch + EDGES, found, quick, n, rank0, rank1, rank2, first_cut, CUTS_HERE, CHUNKS)
        if LAST:
            tl.debug_barrier()
            _finish(wire, scratch + EDGES, scratch + PARAMETERS, extents, levels, CHUNKS)


@triton.jit
def _store_edges(edges, found, quick, n, rank0, rank1, rank2, first_cut, CUTS_HERE: tl.constexpr, CHUNKS: tl.constexpr):
    """The value at a cut's rank ends a chunk; the value after it begins the next one."""
    for cut in tl.static_range(CUTS_HERE):
        row = found + cut * WORDS
        value = float_of(tl.load(row + LOW_KEY, cache_modifier=".cg").to(tl.int32))
        after_key = tl.load(row + NEXT_KEY, cache_modifier=".cg")
        if quick:
            listed = tl.load(row + LISTED_KEY, cache_modifier=".cg")
            after_key = tl.where(listed == NO_KEY, after_key, listed)
        after = float_of(after_key.to(tl.int32))
        rank = _of_cut(cut, rank0, rank1, rank2)
        same = tl.load(row + UP_TO, cache_modifier=".cg") > tl.minimum(rank + 1, n - 1)
        tl.store(edges + CHUNKS + first_cut + cut, value)
        tl.store(edges + 1 + first_cut + cut, tl.where(same, value, after))


@triton.jit
def _search_everything(
    x, n, counters, found, arrivals, rank0, rank1, rank2, CUTS_HERE: tl.constexpr, MAGNITUDE: tl.constexpr
):
    """Count all keys of the tensor by their leading bits, then by the next ones, until every cut is found."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED
    if program == 0:
        for cut in tl.static_range(CUTS_HERE):
            _begin_with_all(found + cut * WORDS, _of_cut(cut, rank0, rank1, rank2))
    wait_for_all(arrived, arrivals)
    arrivals += programs
    while _all_done(found, CUTS_HERE) == 0:
        _count_all(x, n, None, None, 0, counters, found, CUTS_HERE, False, MAGNITUDE)
        wait_for_all(arrived, arrivals)
        for cut in range(program, CUTS_HERE, programs):
            _pick_bin(counters, found + cut * WORDS, cut)
        wait_for_all(arrived, arrivals + programs)
        arrivals += 2 * programs


@triton.jit
def _finish(wire, edges, parameters, extents, levels, CHUNKS: tl.constexpr):
    """From the edges of all chunks: the header of the wire, and what a value is quantized with in each chunk.

    As thinpipe.codecs.layout.bucket_affine has it. NaN or infinity anywhere: a header of NaN, and codes 0.
    """
    programs = tl.arange(0, MOST_PROGRAMS)
    running = programs < tl.num_programs(0)
    low = tl.min(tl.load(extents + programs, mask=running, other=float("inf"), cache_modifier=".cg"), axis=0)
    highs = tl.load(extents + MOST_PROGRAMS + programs, mask=running, other=float("-inf"), cache_modifier=".cg")
    high = tl.max(highs, axis=0)
    odd = tl.load(extents + 2 * MOST_PROGRAMS + programs, mask=running, other=0.0, cache_modifier=".cg")
    finite = tl.sum(odd, axis=0) == 0
    chunks = tl.arange(0, CHUNKS)
    lo = tl.load(edges + chunks, mask=chunks > 0, other=0.0, cache_modifier=".cg")
    hi = tl.load(edges + CHUNKS + chunks, mask=chunks < CHUNKS - 1, other=0.0, cache_modifier=".cg")
    lo = tl.where(finite, tl.where(chunks == 0, low, lo), float("nan"))
    hi = tl.where(finite, tl.where(chunks == CHUNKS - 1, high, hi), float("nan"))
    store_bytes(wire, chunks, lo)
    store_bytes(wire + 4 * CHUNKS, chunks, hi)
    if CHUNKS == 1:
        padding = tl.arange(0, 2)
        store_bytes(wire + 8, padding, tl.zeros([2], tl.float32))
    factor, offset, scale = bucket_affine(lo, hi, levels)
    tl.store(parameters + chunks, tl.where(finite, hi, float("inf")) + 0.0)  # never -0, see negative
    tl.store(parameters + CHUNKS + chunks, factor)
    tl.store(parameters + 2 * CHUNKS + chunks, tl.where(finite, offset, 0.0))
    tl.store(parameters + 3 * CHUNKS + chunks, tl.where(finite, scale, 0.0))
