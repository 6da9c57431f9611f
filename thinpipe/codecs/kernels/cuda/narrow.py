"""The values at the ranks of up to three cuts, from the few that were kept inside their brackets: the fast way.

    1. every program counts its kept values in even bins of the bracket they are in
    2. one program for each cut picks the bin of the wanted rank, and that of the rank after it if it is another
    3. every program adds its values of those bins to a list for each cut: a few thousand of the whole tensor
    4. the lists are ranked by counting, every value against every other

It is given up, and the search by the bits of keys takes over, where brackets overlap or reach to infinity, or where a
list has too little room: many values are equal then, or all but equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.brackets import of_cut
from thinpipe.codecs.kernels.cuda.device import ROWS, key_of, negative
from thinpipe.codecs.kernels.cuda.places import ALL_BINS, APART, BIN_COPIES, ROOM
from thinpipe.codecs.kernels.cuda.reading import load_kept

BINS = tl.constexpr(170)  # of a bracket; of all ALL_BINS the last is of what is not there
FIELD = tl.constexpr(10)  # bits of a count of up to ROWS values
MOST = tl.constexpr((1 << FIELD.value) - 1)  # in a field
NO_KEY = tl.constexpr(-(1 << 40))  # less than any


@triton.jit
def _scale(low, high):
    return BINS / (high - low)


@triton.jit
def _has_bins(low, high):
    """False too for an end that is infinite. Two equal ends enclose nothing."""
    scale = _scale(low, high)
    return (low == high) | ((scale > 0) & (scale < 1e38))


@triton.jit
def possible(lows, highs, CUTS_HERE: tl.constexpr):
    """Whether every kept value is in one bracket alone, and has a bin there."""
    fit = _has_bins(lows[0], highs[0])
    for cut in tl.static_range(1, CUTS_HERE):
        fit = fit & _has_bins(lows[cut], highs[cut]) & (highs[cut - 1] <= lows[cut])
    return fit


@triton.jit
def _bins_of(values, lows, highs, CUTS_HERE: tl.constexpr):
    """The bins of kept values, those of the second bracket after those of the first: they rise as values do."""
    low, scale, base = lows[0], _scale(lows[0], highs[0]), 0
    for cut in tl.static_range(1, CUTS_HERE):
        above = values > lows[cut]
        low = tl.where(above, lows[cut], low)
        scale = tl.where(above, _scale(lows[cut], highs[cut]), scale)
        base = tl.where(above, cut * BINS, base)
    return base + tl.minimum((values - low) * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def count_bins(store, held, slots, counts, lows, highs, CUTS_HERE: tl.constexpr):
    """Step 1: this program's kept values, in the bins of their brackets."""
    mine = tl.zeros([ALL_BINS], tl.int32)
    for start in range(0, slots, ROWS):
        values, there = load_kept(store, held, start)
        bins = _bins_of(values, lows, highs, CUTS_HERE)
        mine += tl.histogram(tl.ravel(tl.where(there, bins, ALL_BINS - 1), can_reorder=True), ALL_BINS)
    bins = tl.arange(0, ALL_BINS)
    copy = (tl.program_id(0) % BIN_COPIES) * ALL_BINS
    tl.atomic_add(counts + copy + bins, mine, mask=(mine > 0) & (bins < ALL_BINS - 1), sem="relaxed")


@triton.jit
def pick_bins(counts, picked, rank, cut):
    """Step 2 for one cut: its rank among the kept values of its bracket -> how many these are.

    Stored: the first bin that is wanted, the last one, and the rank among the values of these bins. A rank of -1 wants
    the value after it alone.
    """
    bins = tl.arange(0, ALL_BINS)
    mine = (bins >= cut * BINS) & (bins < cut * BINS + BINS)
    population = tl.zeros([ALL_BINS], tl.int32)
    for copy in tl.static_range(BIN_COPIES):
        population += tl.load(counts + copy * ALL_BINS + bins, mask=mine, other=0, cache_modifier=".cg")
    reached = tl.cumsum(population, axis=0)
    kept = tl.sum(population, axis=0)
    here = tl.maximum(rank, 0)
    after = tl.minimum(rank + 1, kept - 1)
    first = tl.sum(((reached <= here) | (bins < cut * BINS)).to(tl.int32), axis=0)
    last = tl.sum(((reached <= after) | (bins < cut * BINS)).to(tl.int32), axis=0)
    wanted = (rank >= -1) & (rank < kept)
    passed = tl.sum(tl.where(bins < first, population, 0), axis=0)
    tl.store(picked + 4 * cut, tl.where(wanted, first, 0))
    tl.store(picked + 4 * cut + 1, tl.where(wanted, last, -1))
    tl.store(picked + 4 * cut + 2, tl.where(wanted, rank - passed, -2).to(tl.int32))
    return kept


@triton.jit
def collect(store, held, slots, picked, lengths, lists, lows, highs, CUTS_HERE: tl.constexpr):
    """Step 3: this program's values of the wanted bins, into the lists of their cuts."""
    first0, last0 = _wanted_bins(picked, 0)
    first1, last1, first2, last2 = first0, last0, first0, last0
    if CUTS_HERE > 1:
        first1, last1 = _wanted_bins(picked, 1)
    if CUTS_HERE > 2:
        first2, last2 = _wanted_bins(picked, 2)
    for start in range(0, slots, ROWS):
        values, there = load_kept(store, held, start)
        bins = _bins_of(values, lows, highs, CUTS_HERE)
        cut = tl.where(bins >= 2 * BINS, 2, tl.where(bins >= BINS, 1, 0))
        first, last = of_cut(cut, (first0, first1, first2)), of_cut(cut, (last0, last1, last2))
        wanted = there & (bins >= first) & (bins <= last)
        # What a column has for a list takes its places there at once. Counts of three cuts are fields of one number.
        shift = cut * FIELD
        one = tl.where(wanted, 1 << shift, 0)
        upto = tl.cumsum(one, axis=1)
        counts = tl.sum(one, axis=1)
        place = _reserve(lengths, counts, 0)[:, None]
        if CUTS_HERE > 1:
            place = tl.where(cut == 1, _reserve(lengths, counts, 1)[:, None], place)
        if CUTS_HERE > 2:
            place = tl.where(cut == 2, _reserve(lengths, counts, 2)[:, None], place)
        place += ((upto >> shift) & MOST) - 1
        tl.store(lists + cut * ROOM + place, values, mask=wanted & (place < ROOM))


@triton.jit
def _wanted_bins(picked, cut):
    return tl.load(picked + 4 * cut, cache_modifier=".cg"), tl.load(picked + 4 * cut + 1, cache_modifier=".cg")


@triton.jit
def _reserve(lengths, counts, CUT: tl.constexpr):
    """Room in a cut's list for what each column has for it: the first place."""
    many = (counts >> (CUT * FIELD)) & MOST
    return tl.atomic_add(lengths + CUT * APART + tl.zeros(many.shape, tl.int32), many, mask=many > 0, sem="relaxed")


@triton.jit
def overflown(lengths, CUTS_HERE: tl.constexpr):
    most = tl.load(lengths, cache_modifier=".cg")
    for cut in tl.static_range(1, CUTS_HERE):
        most = tl.maximum(most, tl.load(lengths + cut * APART, cache_modifier=".cg"))
    return most > ROOM


@triton.jit
def rank_lists(picked, lengths, lists, keys, afters, words, CUTS_HERE: tl.constexpr):
    """Step 4: the key of the value at the wanted rank, and of that at the next one if it is in the list.

    The value at a rank is the greatest of those that no more than so many are less than.
    """
    FEW: tl.constexpr = 32
    MANY: tl.constexpr = 256
    AHEAD: tl.constexpr = 4  # loads at a time: one after the other they would take longer than the counting
    # The programs share the cuts; a single one, as Triton's interpreter has it, takes them all.
    program, programs = tl.program_id(0), tl.num_programs(0)
    shared = programs >= CUTS_HERE
    member = tl.where(shared, program // CUTS_HERE, 0)
    for cut in range(tl.where(shared, program % CUTS_HERE, 0), CUTS_HERE, tl.where(shared, CUTS_HERE, 1)):
        members = tl.where(shared, tl.cdiv(programs - cut, CUTS_HERE), 1)
        length = tl.load(lengths + cut * APART, cache_modifier=".cg")
        rank = tl.load(picked + 4 * cut + 2, cache_modifier=".cg")
        values_of = lists + cut * ROOM
        for start in range(member * FEW, length, members * FEW):
            mine = start + tl.arange(0, FEW)
            values = tl.load(values_of + mine, mask=mine < length, other=0.0, cache_modifier=".cg")
            less = tl.zeros([FEW, MANY], tl.int32)
            for other in range(0, length, MANY * AHEAD):
                others = other + tl.arange(0, MANY)
                against0 = _load_others(values_of, others, length)
                against1 = _load_others(values_of, others + MANY, length)
                against2 = _load_others(values_of, others + 2 * MANY, length)
                against3 = _load_others(values_of, others + 3 * MANY, length)
                less += negative(against0[None, :] - values[:, None]) + negative(against1[None, :] - values[:, None])
                less += negative(against2[None, :] - values[:, None]) + negative(against3[None, :] - values[:, None])
            below = tl.where(mine < length, tl.sum(less, axis=1), ROOM)
            key = key_of(values).to(tl.int64)
            _offer(keys + words * cut, tl.where(below <= rank, key, NO_KEY))
            if rank + 1 < length:
                _offer(afters + words * cut, tl.where(below <= rank + 1, key, NO_KEY))


@triton.jit
def _load_others(values, places, length):
    return tl.load(values + places, mask=places < length, other=float("inf"), cache_modifier=".cg")


@triton.jit
def _offer(best, keys):
    greatest = tl.max(keys, axis=0)
    if greatest > NO_KEY:
        tl.atomic_max(best, greatest, sem="relaxed")
