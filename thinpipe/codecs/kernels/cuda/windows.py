"""The values at ranks, by the bits of keys: each is among the keys of a window, which narrows to one of its bins.

    1. of a large tensor, few bins: each program counts its keys by itself, and adds them up with all others once
    2. what is left is so little that keys are added to 2048 bins of their windows one by one
    3. when no window has more than 512 keys, these are collected, and ranked against each other

Windows with more of them are counted as in 2 once more: three times leave one key of all that an int32 can be. Windows
are the same or apart: what is in one is counted once. The keys are those of the kept values; or of the whole tensor,
where there is no sample of it, or where one was misleading: slower by far, and always right.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import key_of, wait_for_all
from thinpipe.codecs.kernels.cuda.places import (
    AMOUNTS,
    ARRIVED,
    BINS,
    COPIES,
    COUNTERS,
    DENSE,
    DENSE_COUNTS,
    FAILED,
    FEW,
    HIGHS,
    HISTOGRAMS,
    INTERVAL_COUNTS,
    INTERVALS,
    LARGE,
    LINE,
    LISTED,
    LISTS,
    LOWS,
    RANKS,
    ROUNDS,
    SLOTS,
    TABLE,
    TARGETS,
    UPPERS,
    WINDOWS,
)
from thinpipe.codecs.kernels.cuda.reading import EACH, SPAN, load_anywhere, load_kept
from thinpipe.codecs.kernels.cuda.sample import rank_of_cut

NO_KEY = tl.constexpr(0x7FFFFFFF)
LEAST_KEY = tl.constexpr(-0x7FFFFFFF)


@triton.jit
def rank_of_target(target, n, small, larger, first_cut):
    """Two for each cut: the last value before it, and the first behind it."""
    rank = rank_of_cut(first_cut + target // 2, small, larger)
    return tl.minimum(rank + target % 2, n - 1)


@triton.jit
def open_windows(n, counters, scratch, small, larger, first_cut, cuts):
    """From the counts of all intervals: that of each rank, as far as its values are kept or are only one."""
    lanes, table = tl.arange(0, INTERVALS), scratch + TABLE
    counts = (counters + INTERVAL_COUNTS).to(tl.pointer_type(tl.int64))
    each = tl.load(counts + lanes, cache_modifier=".cg")
    reached = tl.cumsum(each, axis=0)
    for target in range(tl.program_id(0), 2 * cuts, tl.num_programs(0)):
        rank = rank_of_target(tl.cast(target, tl.int32), n, small, larger, first_cut)
        interval = tl.sum((reached <= rank).to(tl.int32), axis=0)
        passed = tl.max(tl.where(lanes < interval, reached, 0), axis=0)
        here = lanes == interval
        begin = tl.load(table + lanes - 1, mask=lanes > 0, other=float("-inf"))
        first = tl.sum(tl.where(here, key_of(begin) + 1, 0), axis=0)
        end = tl.sum(tl.where(here, key_of(tl.load(table + lanes)), 0), axis=0)
        upper = tl.sum(tl.where(here, key_of(tl.load(table + UPPERS + lanes)), 0), axis=0)
        last = tl.where(first == end, end, tl.minimum(end, upper))
        _store_window(scratch, target, first, last, rank - passed, tl.sum(tl.where(here, each, 0), axis=0))
        if last < first:
            tl.store(counters + FAILED, 1)


@triton.jit
def open_all(n, counters, scratch, small, larger, first_cut, cuts):
    """Windows that hold all keys; histograms are empty again."""
    targets = tl.arange(0, TARGETS)
    if tl.program_id(0) == 0:
        ranks = rank_of_target(targets, n, small, larger, first_cut)
        every = tl.zeros([TARGETS], tl.int32)
        _store_window(scratch, targets, every + LEAST_KEY, every + (NO_KEY - 1), ranks, every.to(tl.int64) + n)
        tl.store(counters + FAILED, 0)
    BATCH: tl.constexpr = 1024
    lanes = tl.arange(0, BATCH)
    for start in range(tl.program_id(0) * BATCH, COUNTERS - DENSE_COUNTS, tl.num_programs(0) * BATCH):
        there = start + lanes < COUNTERS - DENSE_COUNTS
        tl.store(counters + DENSE_COUNTS + start + lanes, tl.zeros([BATCH], tl.int32), mask=there)


@triton.jit
def _store_window(scratch, target, first, last, rank, amount):
    tl.store((scratch + LOWS).to(tl.pointer_type(tl.int32)) + target, first)
    tl.store((scratch + HIGHS).to(tl.pointer_type(tl.int32)) + target, last)
    tl.store((scratch + RANKS).to(tl.pointer_type(tl.int64)) + target, rank)
    tl.store((scratch + AMOUNTS).to(tl.pointer_type(tl.int64)) + target, amount)


@triton.jit
def _load_windows(scratch, cuts):
    """First and last keys of the windows of all targets, in which there is something to search for, and in how much."""
    targets = tl.arange(0, TARGETS)
    first = tl.load((scratch + LOWS).to(tl.pointer_type(tl.int32)) + targets, cache_modifier=".cg")
    last = tl.load((scratch + HIGHS).to(tl.pointer_type(tl.int32)) + targets, cache_modifier=".cg")
    amount = tl.load((scratch + AMOUNTS).to(tl.pointer_type(tl.int64)) + targets, cache_modifier=".cg")
    wide = (targets < 2 * cuts) & (first < last)
    return first, last, wide, tl.max(tl.where(wide, amount, 0), axis=0)


@triton.jit
def narrow(x, n, counters, scratch, columns, held, cuts, arrivals, from_kept, MAGNITUDE: tl.constexpr):
    """Rounds until every window holds one key -> the arrivals to wait for next."""
    arrived, program, programs = counters + ARRIVED, tl.program_id(0), tl.num_programs(0)
    first, last, wide, most = _load_windows(scratch, cuts)
    turn = tl.where(n < LARGE, 1, 0)
    while tl.max(wide.to(tl.int32), axis=0) > 0:
        windows = (scratch + WINDOWS).to(tl.pointer_type(tl.int32))
        windows += (program * (2 + ROUNDS) + turn) * (3 * TARGETS)
        count = tl.sum(_once(first, wide).to(tl.int32), axis=0)
        bins = tl.where(turn == 0, _dense_bins(count), BINS)
        place = _store_table(windows, first, last, wide, bins)
        dense = tl.zeros([DENSE], tl.int32)
        # Memory adds to a cache line about every 27 cycles: what all programs count in few lines they count in copies.
        copies = tl.where(turn == 0, COPIES, tl.minimum(tl.full([], SLOTS, tl.int32) // count, COPIES))
        size = tl.where(turn == 0, DENSE, count * BINS)
        histograms = counters + tl.where(turn == 0, DENSE_COUNTS, HISTOGRAMS + (turn - 1) * (SLOTS * BINS))
        mine = histograms + program % copies * size
        spans = tl.cdiv(tl.cdiv(n, SPAN), programs).to(tl.int32)
        for part in range(tl.where(from_kept, tl.cdiv(tl.max(held, axis=0), EACH), spans)):
            if from_kept:
                values, there = load_kept(columns, held, part * EACH)
            else:
                values, there = load_anywhere(x, n, program + tl.cast(part, tl.int64) * programs, MAGNITUDE)
            keys = key_of(values)
            window, within, inside = _find(keys, there, windows, count)
            if most <= FEW:
                slot = tl.atomic_add(counters + LISTED + window * LINE, 1, mask=inside, sem="relaxed")
                lists = (scratch + LISTS).to(tl.pointer_type(tl.int32)) + window * FEW
                tl.store(lists + slot, keys, mask=inside & (slot < FEW))
            elif turn == 0:
                index = tl.reshape(window * bins + within, [SPAN])
                dense += tl.histogram(index, DENSE, mask=tl.reshape(inside, [SPAN]))
            else:
                tl.atomic_add(mine + window * bins + within, 1, mask=inside, sem="relaxed")
        if turn == 0:
            tl.atomic_add(mine + tl.arange(0, DENSE), dense, mask=dense > 0, sem="relaxed")
        wait_for_all(arrived, arrivals)
        for target in range(program, 2 * cuts, programs):
            its = (tl.arange(0, TARGETS) == target) & wide
            if tl.max(its.to(tl.int32), axis=0) > 0:
                window = tl.sum(tl.where(its, place, 0), axis=0)
                if most <= FEW:
                    _pick_listed(counters, scratch, window, target)
                else:
                    _pick(counters, scratch, histograms + window * bins, bins, copies, size, target)
        wait_for_all(arrived, arrivals + programs)
        arrivals += 2 * programs
        turn += 1
        first, last, wide, most = _load_windows(scratch, cuts)
    return arrivals


@triton.jit
def _dense_bins(count):
    """Bins of each of so many windows in the first round: a power of two."""
    bins = tl.full([], DENSE, tl.int32)
    while bins * count > DENSE:
        bins = bins // 2
    return bins


@triton.jit
def _shift_of(first, last, bins):
    """How many bits of a key's distance to leave out so that a window has no more than so many bins."""
    distance = last.to(tl.uint32, bitcast=True) - first.to(tl.uint32, bitcast=True)
    shift = tl.zeros(first.shape, tl.uint32)
    for _ in range(28):
        shift += ((distance >> shift) >= bins).to(tl.uint32)
    return shift


@triton.jit
def _once(first, wide):
    """Which targets have a window that no target before has."""
    targets = tl.arange(0, TARGETS)
    same = (first[None, :] == first[:, None]) & (targets[None, :] < targets[:, None]) & wide[None, :]
    return wide & (tl.max(same.to(tl.int32), axis=1) == 0)


@triton.jit
def _store_table(windows, first, last, wide, bins):
    """The different windows in order: first keys, last keys, shifts -> the place of each target's."""
    targets = tl.arange(0, TARGETS)
    tl.store(
        windows + targets, tl.full([TARGETS], NO_KEY, tl.int32)
    )  # behind them some that hold nothing, not even NaN
    tl.store(windows + TARGETS + targets, tl.full([TARGETS], LEAST_KEY, tl.int32))
    once = _once(first, wide)
    place = tl.sum(((first[None, :] < first[:, None]) & once[None, :]).to(tl.int32), axis=1)
    tl.debug_barrier()
    tl.store(windows + place, first, mask=once)
    tl.store(windows + TARGETS + place, last, mask=once)
    tl.store(windows + 2 * TARGETS + place, _shift_of(first, last, bins).to(tl.int32), mask=once)
    tl.debug_barrier()
    return place


@triton.jit
def _find(keys, there, windows, count):
    """The window of each key, and its bin there; and which keys are in one."""
    index = tl.zeros(keys.shape, tl.int32)
    half = tl.full([], 1, tl.int32)
    while 2 * half <= count:
        half *= 2
    while half > 0:
        index += tl.where(keys >= tl.load(windows + (index + (half - 1))), half, 0)
        half = half // 2
    index -= 1
    inside = there & (index >= 0)
    first = tl.load(windows + index, mask=inside, other=0)
    inside &= keys <= tl.load(windows + TARGETS + index, mask=inside, other=LEAST_KEY)
    shift = tl.load(windows + 2 * TARGETS + index, mask=inside, other=0)
    distance = keys.to(tl.uint32, bitcast=True) - first.to(tl.uint32, bitcast=True)
    return index, (distance >> shift.to(tl.uint32)).to(tl.int32), inside


@triton.jit
def _pick(counters, scratch, histogram, bins, copies, size, target):
    """A target's window becomes the bin that its rank falls into. If that lies beyond them, the sample misled."""
    SOME: tl.constexpr = 32
    first = tl.load((scratch + LOWS).to(tl.pointer_type(tl.int32)) + target, cache_modifier=".cg")
    last = tl.load((scratch + HIGHS).to(tl.pointer_type(tl.int32)) + target, cache_modifier=".cg")
    rank = tl.load((scratch + RANKS).to(tl.pointer_type(tl.int64)) + target, cache_modifier=".cg")
    # First which 32 bins, then which of these.
    groups, some = tl.arange(0, BINS // SOME), tl.arange(0, SOME)
    counted = tl.zeros([BINS // SOME, SOME], tl.int64)
    for copy in range(copies):
        at = groups[:, None] * SOME + some[None, :]
        counted += tl.load(histogram + copy * size + at, mask=at < bins, other=0, cache_modifier=".cg")
    group, passed, _ = _where(tl.sum(counted, axis=1), rank, groups)
    counted = tl.zeros([SOME], tl.int64)
    for copy in range(copies):
        at = group * SOME + some
        counted += tl.load(histogram + copy * size + at, mask=at < bins, other=0, cache_modifier=".cg")
    within, more, amount = _where(counted, rank - passed, some)
    picked = group * SOME + within
    if picked >= bins:
        tl.store(counters + FAILED, 1)
        picked = 0
    shift = _shift_of(first + tl.zeros([1], tl.int32), last + tl.zeros([1], tl.int32), bins)
    shift = tl.max(shift, axis=0).to(tl.int64)
    begin = first.to(tl.int64) + (picked.to(tl.int64) << shift)
    end = tl.minimum(begin + (tl.full([], 1, tl.int64) << shift) - 1, last.to(tl.int64))
    _store_window(scratch, target, begin.to(tl.int32), end.to(tl.int32), rank - passed - more, amount)


@triton.jit
def _where(counts, rank, lanes):
    """Which of so many counts, one behind the other, a rank falls into, how many come before, and how many there."""
    reached = tl.cumsum(counts, axis=0)
    found = tl.sum((reached <= rank).to(tl.int32), axis=0)
    passed = tl.max(tl.where(lanes < found, reached, 0), axis=0)
    return found, passed, tl.max(tl.where(lanes == found, counts, 0), axis=0)


@triton.jit
def _pick_listed(counters, scratch, window, target):
    """A target's window becomes the one of the collected keys that has its rank."""
    SOME: tl.constexpr = 32
    lanes, some = tl.arange(0, FEW), tl.arange(0, SOME)
    rank = tl.load((scratch + RANKS).to(tl.pointer_type(tl.int64)) + target, cache_modifier=".cg").to(tl.int32)
    found = tl.load(counters + LISTED + window * LINE, cache_modifier=".cg")
    count = tl.minimum(found, FEW)
    listed = (scratch + LISTS).to(tl.pointer_type(tl.int32)) + window * FEW
    keys = tl.load(listed + lanes, mask=lanes < count, other=NO_KEY, cache_modifier=".cg")
    below, upto = tl.zeros([FEW], tl.int32), tl.zeros([FEW], tl.int32)
    for start in range(0, count, SOME):
        others = tl.load(listed + start + some, mask=start + some < count, other=NO_KEY, cache_modifier=".cg")
        below += tl.sum((others[None, :] < keys[:, None]).to(tl.int32), axis=1)
        upto += tl.sum((others[None, :] <= keys[:, None]).to(tl.int32), axis=1)
    its = (below <= rank) & (rank < upto) & (lanes < count)
    if (tl.max(its.to(tl.int32), axis=0) == 0) | (found > FEW):
        tl.store(counters + FAILED, 1)
    key = tl.max(tl.where(its, keys, LEAST_KEY), axis=0)
    _store_window(scratch, target, key, key, rank.to(tl.int64), count.to(tl.int64))
