"""The values at cuts by the bits of keys: counted by the leading bits, then by the next ones in the winning bin.

Through the kept values, where ranking lists of them was not possible; through the whole tensor, where a bracket did not
hold its cut or held more than there was room for: slower by far, and always right.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import COLUMNS, key_of, total, wait_for_all
from thinpipe.codecs.kernels.cuda.places import (
    ARRIVED,
    CUTS,
    DONE,
    FAILED,
    HIGH_KEY,
    HISTOGRAM,
    KEY_BINS,
    KEY_COPIES,
    LOW_KEY,
    NEXT_KEY,
    RANK,
    SUMS,
    UP_TO,
    WORDS,
)
from thinpipe.codecs.kernels.cuda.reading import load_part, parts


@triton.jit
def _total(partials, which):
    return total(partials + which, SUMS, tl.num_programs(0))


@triton.jit
def begin(counters, row, partials, n, rank, low, high, ties, lo_tie, cut):
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
    """How many bits to leave out so that the keys from low to high fall into KEY_BINS bins."""
    shift = tl.zeros([], tl.int64)
    while ((high - low) >> shift) >= KEY_BINS:
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
    window = (low.to(tl.int32), high.to(tl.int32), shift.to(tl.uint32), ~done & (low <= high))
    return window, done | (shift == 0)


@triton.jit
def _bins_of(keys, window):
    """The bins of keys in a window, and which keys are in it."""
    low, high, shift, count = window
    distance = (keys - low).to(tl.uint32, bitcast=True)
    return (distance >> shift).to(tl.int32), count & (distance <= (high - low).to(tl.uint32, bitcast=True))


@triton.jit
def _least_above(least, keys, there, window):
    """The least key above a window, of every column."""
    return tl.minimum(least, tl.min(tl.where(there & (keys > window[1]), keys, 0x7FFFFFFF), axis=1))


@triton.jit
def _offer_next(found, cut, least, next):
    if next:
        tl.atomic_min(found + cut * WORDS + NEXT_KEY, tl.min(least, axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def pick_bin(counters, row, cut):
    """Narrow a cut's keys to the bin that its rank falls into; False if the rank lies beyond them."""
    bins = tl.arange(0, KEY_BINS)
    low = tl.load(row + LOW_KEY, cache_modifier=".cg")
    high = tl.load(row + HIGH_KEY, cache_modifier=".cg")
    rank = tl.load(row + RANK, cache_modifier=".cg")
    upto = tl.load(row + UP_TO, cache_modifier=".cg")
    population = tl.zeros([KEY_BINS], tl.int32)
    for copy in tl.static_range(KEY_COPIES):
        counts = counters + HISTOGRAM + (copy * CUTS + cut) * KEY_BINS + bins
        population += tl.load(counts, cache_modifier=".cg")
        tl.store(counts, tl.zeros([KEY_BINS], tl.int32))  # for the next bits
    reached = tl.cumsum(population.to(tl.int64), axis=0)
    picked = tl.sum((reached <= rank).to(tl.int32), axis=0)
    passed = tl.max(tl.where(bins < picked, reached, 0), axis=0)
    shift = _shift(low, high)
    last = shift == 0
    if last:
        passed_all = tl.max(tl.where(bins <= picked, reached, 0), axis=0)
        tl.store(row + UP_TO, upto + passed_all)
        following = tl.min(tl.where((bins > picked) & (population > 0), bins, KEY_BINS), axis=0)
        beyond = tl.load(row + NEXT_KEY, cache_modifier=".cg")
        tl.store(row + NEXT_KEY, tl.where(following < KEY_BINS, low + following, beyond))
    else:
        tl.store(row + UP_TO, upto + passed)
    start = low + (picked.to(tl.int64) << shift)
    tl.store(row + LOW_KEY, start)
    tl.store(row + HIGH_KEY, tl.minimum(start + (tl.full([], 1, tl.int64) << shift) - 1, high))
    tl.store(row + RANK, rank - passed)
    tl.store(row + DONE, last.to(tl.int64))
    return picked < KEY_BINS


@triton.jit
def take_high_end(counters, row, partials, n, rank, high, ties, hi_tie, cut):
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
def all_done(found, CUTS_HERE: tl.constexpr):
    done = tl.full([], 1, tl.int64)
    for cut in tl.static_range(CUTS_HERE):
        done = done & tl.load(found + cut * WORDS + DONE, cache_modifier=".cg")
    return done


@triton.jit
def count_all(
    x, n, store, held, slots, counters, found, CUTS_HERE: tl.constexpr, KEPT: tl.constexpr, MAGNITUDE: tl.constexpr
):
    """This program's keys, counted for every cut that is not done, and the least of them above each last window."""
    window0, next0 = _window(found, 0, CUTS_HERE)
    window1, next1 = _window(found, 1, CUTS_HERE)
    window2, next2 = _window(found, 2, CUTS_HERE)
    windows = (window0, window1, window2)
    # A key is as a rule in one window at most, and counting it once is cheaper than asking for every cut.
    if _apart(window0, window1) & _apart(window1, window2) & _apart(window0, window2):
        _count_windows(x, n, store, held, slots, counters, windows, CUTS_HERE, True, KEPT, MAGNITUDE)
    else:
        _count_windows(x, n, store, held, slots, counters, windows, CUTS_HERE, False, KEPT, MAGNITUDE)
    if next0 & next1 & next2:
        least0 = tl.full([COLUMNS], 0x7FFFFFFF, tl.int32)
        least1 = tl.full([COLUMNS], 0x7FFFFFFF, tl.int32)
        least2 = tl.full([COLUMNS], 0x7FFFFFFF, tl.int32)
        for part in range(0, parts(n, slots, KEPT)):
            values, there = load_part(x, n, store, held, part, KEPT, MAGNITUDE)
            keys = key_of(values)
            least0 = _least_above(least0, keys, there, window0)
            if CUTS_HERE > 1:
                least1 = _least_above(least1, keys, there, window1)
            if CUTS_HERE > 2:
                least2 = _least_above(least2, keys, there, window2)
        _offer_next(found, 0, least0, next0)
        if CUTS_HERE > 1:
            _offer_next(found, 1, least1, next1)
        if CUTS_HERE > 2:
            _offer_next(found, 2, least2, next2)


@triton.jit
def _apart(lower, upper):
    """Whether no key is counted in both windows."""
    return ~(lower[3] & upper[3] & (lower[1] >= upper[0]))


@triton.jit
def _count_windows(
    x, n, store, held, slots, counters, windows,
    CUTS_HERE: tl.constexpr, APART: tl.constexpr, KEPT: tl.constexpr, MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """This program's keys in the bins of the windows; APART: a key is in one window at most."""
    counts = counters + HISTOGRAM + (tl.program_id(0) % KEY_COPIES) * (CUTS * KEY_BINS)
    for part in range(0, parts(n, slots, KEPT)):
        values, there = load_part(x, n, store, held, part, KEPT, MAGNITUDE)
        keys = key_of(values)
        bins, inside = _bins_of(keys, windows[0])
        for cut in tl.static_range(1, CUTS_HERE):
            other_bins, other_inside = _bins_of(keys, windows[cut])
            if APART:
                bins = tl.where(other_inside, other_bins + cut * KEY_BINS, bins)
                inside |= other_inside
            else:
                tl.atomic_add(counts + cut * KEY_BINS + other_bins, 1, mask=there & other_inside, sem="relaxed")
        tl.atomic_add(counts + bins, 1, mask=there & inside, sem="relaxed")


@triton.jit
def search_everything(x, n, counters, found, arrivals, ranks, CUTS_HERE: tl.constexpr, MAGNITUDE: tl.constexpr):
    """Count all keys of the tensor by their leading bits, then by the next ones, until every cut is found."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED
    if program == 0:
        for cut in tl.static_range(CUTS_HERE):
            _begin_with_all(found + cut * WORDS, ranks[cut])
    wait_for_all(arrived, arrivals)
    arrivals += programs
    while all_done(found, CUTS_HERE) == 0:
        count_all(x, n, None, None, 0, counters, found, CUTS_HERE, False, MAGNITUDE)
        wait_for_all(arrived, arrivals)
        for cut in range(program, CUTS_HERE, programs):
            pick_bin(counters, found + cut * WORDS, cut)
        wait_for_all(arrived, arrivals + programs)
        arrivals += 2 * programs
