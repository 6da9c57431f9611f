"""Radix select: the values at given ranks, each in a window of keys that is narrowed to one of its bins per round.

    1. of a large tensor, few bins: each program counts its keys locally, and adds its counts to the common ones once
    2. few keys are left, and atomic adds count them one by one in 2048 bins of their windows
    3. when no window has more than 512 keys, these are collected, and ranked against each other

Bins of 1 and of the first round of 2 are even in the square roots of values: around zero, bins even in keys are nearly
all empty, and so are bins even in values if many values are near zero. Windows with too many keys are counted as in 2
again, in bins even in keys: three rounds leave one of all int32 keys. Windows are equal or disjoint, and the keys of
equal ones are counted once. The keys are those of the kept values; without a sample, or if the sample was misleading,
those of all values of the tensor: slower by far, and always right.
"""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.counting import load_part, parts_of
from thinpipe.codecs.kernels.cuda.device import key_of, wait_for_all
from thinpipe.codecs.kernels.cuda.offsets import (
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
    TARGETS,
    UPPERS,
    WINDOWS,
)
from thinpipe.codecs.kernels.cuda.sample import rank_of_cut

NO_KEY = tl.constexpr(0x7FFFFFFF)
LEAST_KEY = tl.constexpr(-0x7FFFFFFF)
BY_ROOT = tl.constexpr(2)  # rounds whose bins are even in roots: the one with few bins, and the next
# Offsets in a table of windows, after first keys: last keys, and for bins shifts, first roots and scales.
LAST, SHIFT, ROOT, SCALE = (tl.constexpr(place * TARGETS.value) for place in (1, 2, 3, 4))


@triton.jit
def rank_of_target(target, n, small, larger, first_cut):
    """Return the rank of a target. Each cut has two: the last value before it, and the first after it."""
    rank = rank_of_cut(first_cut + target // 2, small, larger)
    return tl.minimum(rank + target % 2, n - 1)


@triton.jit
def open_windows(counters, table, ranks):
    """Return the window of each rank, from the counts of all intervals: the kept part of one, or its only value.

    Returns the first and the last key of each window, the rank among its values, and the number of these. Every program
    computes them itself, which takes less time than a barrier.
    """
    lanes = tl.arange(0, INTERVALS)
    each = tl.load((counters + INTERVAL_COUNTS).to(tl.pointer_type(tl.int64)) + lanes)
    reached = tl.cumsum(each, axis=0)
    begins = key_of(tl.load(table + lanes - 1, mask=lanes > 0, other=float("-inf"))) + 1
    ends = key_of(tl.load(table + lanes))
    kept = tl.minimum(ends, key_of(tl.load(table + UPPERS + lanes)))
    kept = tl.where(begins == ends, ends, kept)
    passed = reached[None, :] <= ranks[:, None]
    here = lanes[None, :] == tl.sum(passed.to(tl.int32), axis=1)[:, None]
    first = tl.sum(tl.where(here, begins[None, :], 0), axis=1)
    last = tl.sum(tl.where(here, kept[None, :], 0), axis=1)
    before = tl.max(tl.where(passed, reached[None, :], 0), axis=1)
    return first, last, ranks - before, tl.sum(tl.where(here, each[None, :], 0), axis=1)


@triton.jit
def open_all(n, counters, ranks):
    """Clear the histograms; return windows that hold all keys, in the form of open_windows."""
    BATCH: tl.constexpr = 1024
    lanes = tl.arange(0, BATCH)
    for start in range(tl.program_id(0) * BATCH, COUNTERS - DENSE_COUNTS, tl.num_programs(0) * BATCH):
        there = start + lanes < COUNTERS - DENSE_COUNTS
        tl.store(counters + DENSE_COUNTS + start + lanes, tl.zeros([BATCH], tl.int32), mask=there)
    if tl.program_id(0) == 0:
        tl.store(counters + FAILED, 0)
    every = tl.zeros(ranks.shape, tl.int32)
    return every + LEAST_KEY, every + (NO_KEY - 1), ranks, every.to(tl.int64) + n


@triton.jit
def store_window(scratch, target, first, last, rank, amount):
    tl.store((scratch + LOWS).to(tl.pointer_type(tl.int32)) + target, first)
    tl.store((scratch + HIGHS).to(tl.pointer_type(tl.int32)) + target, last)
    tl.store((scratch + RANKS).to(tl.pointer_type(tl.int64)) + target, rank)
    tl.store((scratch + AMOUNTS).to(tl.pointer_type(tl.int64)) + target, amount)


@triton.jit
def _load_windows(scratch, cuts):
    """Return first and last keys of all windows, a mask of those to narrow, and the most keys that one of these has."""
    targets = tl.arange(0, TARGETS)
    first = tl.load((scratch + LOWS).to(tl.pointer_type(tl.int32)) + targets, cache_modifier=".cg")
    last = tl.load((scratch + HIGHS).to(tl.pointer_type(tl.int32)) + targets, cache_modifier=".cg")
    amount = tl.load((scratch + AMOUNTS).to(tl.pointer_type(tl.int64)) + targets, cache_modifier=".cg")
    wide = (targets < 2 * cuts) & (first < last)
    return first, last, wide, tl.max(tl.where(wide, amount, 0), axis=0)


@triton.jit
def narrow(x, n, counters, scratch, columns, held, opened, cuts, arrivals, use_kept, MAGNITUDE: tl.constexpr):
    """Narrow windows in rounds until each holds one key; return the arrivals to wait for next."""
    arrived, program, programs = counters + ARRIVED, tl.program_id(0), tl.num_programs(0)
    first, last, _, amount = opened
    wide = (tl.arange(0, TARGETS) < 2 * cuts) & (first < last)
    most = tl.max(tl.where(wide, amount, 0), axis=0)
    turn = tl.where(n < LARGE, 1, 0)
    while tl.max(wide.to(tl.int32), axis=0) > 0:
        windows = (scratch + WINDOWS).to(tl.pointer_type(tl.int32))
        windows += (program * (2 + ROUNDS) + turn) * (5 * TARGETS)
        count = tl.sum(_once(first, wide).to(tl.int32), axis=0)
        bins = tl.where(turn == 0, _dense_bins(count), BINS)
        place = _store_table(windows, first, last, wide, bins)
        by_root = turn < BY_ROOT
        dense = tl.zeros([DENSE], tl.int32)
        # Atomic adds to one cache line take about 27 cycles each: histograms of few lines are kept in copies.
        copies = tl.where(turn == 0, COPIES, tl.minimum(tl.full([], SLOTS, tl.int32) // count, COPIES))
        size = tl.where(turn == 0, DENSE, count * BINS)
        histograms = counters + tl.where(turn == 0, DENSE_COUNTS, HISTOGRAMS + (turn - 1) * (SLOTS * BINS))
        mine = histograms + program % copies * size
        # Prefetch: a part is loaded while the one before it is counted.
        following = load_part(x, n, columns, held, 0, use_kept, MAGNITUDE)
        for part in range(parts_of(n, held, use_kept)):
            values, there = following
            following = load_part(x, n, columns, held, part + 1, use_kept, MAGNITUDE)
            keys = key_of(values)
            window, inside = _find(keys, there, windows, count)
            if most <= FEW:
                slot = tl.atomic_add(counters + LISTED + window * LINE, 1, mask=inside, sem="relaxed")
                lists = (scratch + LISTS).to(tl.pointer_type(tl.int32)) + window * FEW
                tl.store(lists + slot, keys, mask=inside & (slot < FEW))
            else:
                index = window * bins + _bin_of(keys, windows + window, inside, bins, by_root)
                if turn == 0:
                    dense += tl.histogram(tl.ravel(index), DENSE, mask=tl.ravel(inside))
                else:
                    tl.atomic_add(mine + index, 1, mask=inside, sem="relaxed")
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
                    counts = histograms + window * bins
                    _pick(counters, scratch, counts, bins, copies, size, target, windows + window, by_root)
        wait_for_all(arrived, arrivals + programs)
        arrivals += 2 * programs
        turn += 1
        first, last, wide, most = _load_windows(scratch, cuts)
    return arrivals


@triton.jit
def _dense_bins(count):
    """Return the number of bins of each of ``count`` windows in the first round: a power of two."""
    bins = tl.full([], DENSE, tl.int32)
    while bins * count > DENSE:
        bins = bins // 2
    return bins


@triton.jit
def _shift_of(first, last, bins):
    """Return the number of low bits of a key's distance to drop so that a window has no more than ``bins`` bins."""
    distance = last.to(tl.uint32, bitcast=True) - first.to(tl.uint32, bitcast=True)
    shift = tl.zeros(first.shape, tl.uint32)
    for _ in range(28):
        shift += ((distance >> shift) >= bins).to(tl.uint32)
    return shift


@triton.jit
def _once(first, wide):
    """Return a mask of the targets whose window no target before has."""
    targets = tl.arange(0, TARGETS)
    same = (first[None, :] == first[:, None]) & (targets[None, :] < targets[:, None]) & wide[None, :]
    return wide & (tl.max(same.to(tl.int32), axis=1) == 0)


@triton.jit
def _store_table(windows, first, last, wide, bins):
    """Store the distinct windows in order; return the place of each target's window."""
    targets = tl.arange(0, TARGETS)
    # The padding windows hold no key, not even that of NaN.
    tl.store(windows + targets, tl.full([TARGETS], NO_KEY, tl.int32))
    tl.store(windows + LAST + targets, tl.full([TARGETS], LEAST_KEY, tl.int32))
    once = _once(first, wide)
    place = tl.sum(((first[None, :] < first[:, None]) & once[None, :]).to(tl.int32), axis=1)
    tl.debug_barrier()
    tl.store(windows + place, first, mask=once)
    tl.store(windows + LAST + place, last, mask=once)
    tl.store(windows + SHIFT + place, _shift_of(first, last, bins).to(tl.int32), mask=once)
    root = _root_of(first)
    width = _root_of(last) - root
    scale = tl.where(width > 0, bins / width, 0.0)
    tl.store(windows + ROOT + place, root.to(tl.int32, bitcast=True), mask=once)
    tl.store(windows + SCALE + place, scale.to(tl.int32, bitcast=True), mask=once)
    tl.debug_barrier()
    return place


@triton.jit
def _find(keys, there, windows, count):
    """Return the window of each key, by binary search, and a mask of the keys that are in one."""
    index = tl.zeros(keys.shape, tl.int32)
    half = tl.full([], 1, tl.int32)
    while 2 * half <= count:
        half *= 2
    while half > 0:
        index += tl.where(keys >= tl.load(windows + (index + (half - 1))), half, 0)
        half = half // 2
    index -= 1
    inside = there & (index >= 0)
    return index, inside & (keys <= tl.load(windows + LAST + index, mask=inside, other=LEAST_KEY))


@triton.jit
def _root_of(keys):
    """Return the square root of a value's magnitude, with its sign, to 4 %: half of its exponent.

    It rises with the value.
    """
    half = ((tl.abs(keys) >> 1) + 0x1FBD1DF5).to(tl.float32, bitcast=True)
    return tl.where(keys < 0, -half, half)


@triton.jit
def _bin_of(keys, window, inside, bins, by_root):
    """Return the bin of each key in its window; undefined for keys that are in none."""
    if by_root:
        root = tl.load(window + ROOT, mask=inside, other=0).to(tl.float32, bitcast=True)
        scale = tl.load(window + SCALE, mask=inside, other=0).to(tl.float32, bitcast=True)
        scaled = (_root_of(keys) - root) * scale
        within = tl.minimum(scaled, bins - 1).to(tl.int32)
    else:
        distance = keys.to(tl.uint32, bitcast=True) - tl.load(window, mask=inside, other=0).to(tl.uint32, bitcast=True)
        within = (distance >> tl.load(window + SHIFT, mask=inside, other=0).to(tl.uint32)).to(tl.int32)
    return within


@triton.jit
def _pick(counters, scratch, histogram, bins, copies, size, target, window, by_root):
    """Replace a target's window by the bin that its rank falls into.

    If the rank lies beyond all bins, set FAILED: the sample was misleading.
    """
    SOME: tl.constexpr = 32
    rank = tl.load((scratch + RANKS).to(tl.pointer_type(tl.int64)) + target, cache_modifier=".cg")
    # First the group of 32 bins, then the bin in it.
    groups, some = tl.arange(0, BINS // SOME), tl.arange(0, SOME)
    at = groups[:, None] * SOME + some[None, :]
    counted = tl.zeros([BINS // SOME, SOME], tl.int32)
    for copy in tl.static_range(COPIES):
        there = (at < bins) & (copy < copies)
        counted += tl.load(histogram + copy * size + at, mask=there, other=0, cache_modifier=".cg")
    group, passed, _ = _where(tl.sum(counted, axis=1).to(tl.int64), rank, groups)
    counted = tl.sum(tl.where(groups[:, None] == group, counted, 0), axis=0)
    within, more, amount = _where(counted.to(tl.int64), rank - passed, some)
    picked = group * SOME + within
    if picked >= bins:
        tl.store(counters + FAILED, 1)
        picked = 0
    begin, end = _keys_of(picked, window, bins, by_root)
    store_window(scratch, target, begin, end, rank - passed - more, amount)


@triton.jit
def _keys_of(picked, window, bins, by_root):
    """Return the first and the last key of a window's bin, by counting the keys before it and before the next bin."""
    DIGIT: tl.constexpr = 8
    lanes = tl.arange(0, 1 << DIGIT)[None, :].to(tl.int64)
    bound = (picked + tl.arange(0, 2))[:, None]
    first, last = tl.load(window).to(tl.int64), tl.load(window + LAST).to(tl.int64)
    before = tl.zeros([2], tl.int64)
    for digit in range(1, 32 // DIGIT + 1):
        shift = tl.cast(32 - DIGIT * digit, tl.int64)
        keys = first + before[:, None] + ((lanes + 1) << shift) - 1
        there = keys <= last
        within = _bin_of(
            tl.where(there, keys, first).to(tl.int32), window + tl.zeros(keys.shape, tl.int32), there, bins, by_root
        )
        before += tl.sum((there & (within < bound)).to(tl.int64), axis=1) << shift
    return (first + tl.min(before, axis=0)).to(tl.int32), (first + tl.max(before, axis=0) - 1).to(tl.int32)


@triton.jit
def _where(counts, rank, lanes):
    """Return the index of the count that a rank falls into, the sum of the counts before it, and the count itself."""
    reached = tl.cumsum(counts, axis=0)
    found = tl.sum((reached <= rank).to(tl.int32), axis=0)
    passed = tl.max(tl.where(lanes < found, reached, 0), axis=0)
    return found, passed, tl.max(tl.where(lanes == found, counts, 0), axis=0)


@triton.jit
def _pick_listed(counters, scratch, window, target):
    """Replace a target's window by the collected key that has its rank."""
    SOME: tl.constexpr = 32
    lanes, some = tl.arange(0, FEW), tl.arange(0, SOME)
    rank = tl.load((scratch + RANKS).to(tl.pointer_type(tl.int64)) + target, cache_modifier=".cg").to(tl.int32)
    found = tl.load(counters + LISTED + window * LINE, cache_modifier=".cg")
    count = tl.minimum(found, FEW)
    listed = (scratch + LISTS).to(tl.pointer_type(tl.int32)) + window * FEW
    keys = tl.where(lanes < count, tl.load(listed + lanes, cache_modifier=".cg"), NO_KEY)
    below, upto = tl.zeros([FEW], tl.int32), tl.zeros([FEW], tl.int32)
    for start in range(0, count, SOME):
        others = tl.load(listed + start + some, mask=start + some < count, other=NO_KEY, cache_modifier=".cg")
        below += tl.sum((others[None, :] < keys[:, None]).to(tl.int32), axis=1)
        upto += tl.sum((others[None, :] <= keys[:, None]).to(tl.int32), axis=1)
    its = (below <= rank) & (rank < upto) & (lanes < count)
    if (tl.max(its.to(tl.int32), axis=0) == 0) | (found > FEW):
        tl.store(counters + FAILED, 1)
    key = tl.max(tl.where(its, keys, LEAST_KEY), axis=0)
    store_window(scratch, target, key, key, rank.to(tl.int64), count.to(tl.int64))
