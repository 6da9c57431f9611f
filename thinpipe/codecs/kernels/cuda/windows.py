"""The values at ranks, by the bits of keys: each is among the keys of a window, which narrows to one of 2048 bins.

Three rounds leave one key of all that an int32 can be. Windows are the same or apart: what is in one is counted once.
The keys are those of the kept values; or of the whole tensor, where there is no sample of it, or where one was
misleading: slower by far, and always right.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import key_of, wait_for_all
from thinpipe.codecs.kernels.cuda.places import (
    ARRIVED,
    BINS,
    FAILED,
    HIGHS,
    HISTOGRAMS,
    INTERVAL_COUNTS,
    INTERVALS,
    LOWS,
    RANKS,
    ROUNDS,
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
    reached = tl.cumsum(tl.load(counts + lanes, cache_modifier=".cg"), axis=0)
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
        _store_window(scratch, target, first, last, rank - passed)
        if last < first:
            tl.store(counters + FAILED, 1)


@triton.jit
def open_all(n, counters, scratch, small, larger, first_cut, cuts):
    """Windows that hold all keys; histograms are empty again."""
    targets = tl.arange(0, TARGETS)
    if tl.program_id(0) == 0:
        ranks = rank_of_target(targets, n, small, larger, first_cut)
        every = tl.zeros([TARGETS], tl.int32)
        _store_window(scratch, targets, every + LEAST_KEY, every + (NO_KEY - 1), ranks)
        tl.store(counters + FAILED, 0)
    MANY: tl.constexpr = 1024
    lanes = tl.arange(0, MANY)
    for start in range(tl.program_id(0) * MANY, ROUNDS * TARGETS * BINS, tl.num_programs(0) * MANY):
        tl.store(counters + HISTOGRAMS + start + lanes, tl.zeros([MANY], tl.int32))


@triton.jit
def _store_window(scratch, target, first, last, rank):
    tl.store((scratch + LOWS).to(tl.pointer_type(tl.int32)) + target, first)
    tl.store((scratch + HIGHS).to(tl.pointer_type(tl.int32)) + target, last)
    tl.store((scratch + RANKS).to(tl.pointer_type(tl.int64)) + target, rank)


@triton.jit
def _load_windows(scratch, cuts):
    """First and last keys of the windows of all targets, and in which of them there is something to search for."""
    targets = tl.arange(0, TARGETS)
    first = tl.load((scratch + LOWS).to(tl.pointer_type(tl.int32)) + targets, cache_modifier=".cg")
    last = tl.load((scratch + HIGHS).to(tl.pointer_type(tl.int32)) + targets, cache_modifier=".cg")
    return first, last, (targets < 2 * cuts) & (first < last)


@triton.jit
def narrow(x, n, counters, scratch, columns, held, cuts, arrivals, from_kept, MAGNITUDE: tl.constexpr):
    """Rounds until every window holds one key -> the arrivals to wait for next."""
    arrived, programs = counters + ARRIVED, tl.num_programs(0)
    turn = 0
    first, last, wide = _load_windows(scratch, cuts)
    while (turn < ROUNDS) & (tl.max(wide.to(tl.int32), axis=0) > 0):
        histograms = counters + HISTOGRAMS + turn * (TARGETS * BINS)
        windows = (scratch + WINDOWS).to(tl.pointer_type(tl.int32))
        windows += (tl.program_id(0) * (3 * ROUNDS) + turn) * TARGETS
        place, count = _store_table(windows, first, last, wide)
        spans = tl.cdiv(tl.cdiv(n, SPAN), programs).to(tl.int32)
        for part in range(tl.where(from_kept, tl.cdiv(tl.max(held, axis=0), EACH), spans)):
            if from_kept:
                values, there = load_kept(columns, held, part * EACH)
            else:
                values, there = load_anywhere(x, n, tl.program_id(0) + tl.cast(part, tl.int64) * programs, MAGNITUDE)
            _count(key_of(values), there, windows, count, histograms)
        wait_for_all(arrived, arrivals)
        for target in range(tl.program_id(0), 2 * cuts, programs):
            mine = (tl.arange(0, TARGETS) == target) & wide
            if tl.max(mine.to(tl.int32), axis=0) > 0:
                _pick(counters, scratch, histograms + tl.sum(tl.where(mine, place, 0), axis=0) * BINS, target)
        wait_for_all(arrived, arrivals + programs)
        arrivals += 2 * programs
        turn += 1
        first, last, wide = _load_windows(scratch, cuts)
    return arrivals


@triton.jit
def _shift_of(first, last):
    """How many bits of a key's distance to leave out so that a window has no more than BINS bins."""
    distance = last.to(tl.uint32, bitcast=True) - first.to(tl.uint32, bitcast=True)
    shift = tl.zeros(first.shape, tl.uint32)
    for _ in range(22):
        shift += ((distance >> shift) >= BINS).to(tl.uint32)
    return shift


@triton.jit
def _store_table(windows, first, last, wide):
    """The different windows in order: first keys, last keys, shifts -> the place of each target's, and how many."""
    targets = tl.arange(0, TARGETS)
    tl.store(windows + targets, tl.full([TARGETS], NO_KEY, tl.int32))
    same = (first[None, :] == first[:, None]) & (targets[None, :] < targets[:, None]) & wide[None, :]
    once = wide & (tl.max(same.to(tl.int32), axis=1) == 0)
    place = tl.sum(((first[None, :] < first[:, None]) & once[None, :]).to(tl.int32), axis=1)
    tl.debug_barrier()
    tl.store(windows + place, first, mask=once)
    tl.store(windows + ROUNDS * TARGETS + place, last, mask=once)
    tl.store(windows + 2 * ROUNDS * TARGETS + place, _shift_of(first, last).to(tl.int32), mask=once)
    tl.debug_barrier()
    return place, tl.sum(once.to(tl.int32), axis=0)


@triton.jit
def _count(keys, there, windows, count, histograms):
    """Add keys to the bins of the windows that they are in."""
    index = tl.full(keys.shape, -1, tl.int32)
    for each in range(count):
        index += (keys >= tl.load(windows + each)).to(tl.int32)
    inside = there & (index >= 0)
    first = tl.load(windows + index, mask=inside, other=0)
    inside &= keys <= tl.load(windows + ROUNDS * TARGETS + index, mask=inside, other=LEAST_KEY)
    shift = tl.load(windows + 2 * ROUNDS * TARGETS + index, mask=inside, other=0)
    distance = keys.to(tl.uint32, bitcast=True) - first.to(tl.uint32, bitcast=True)
    bins = (distance >> shift.to(tl.uint32)).to(tl.int32)
    tl.atomic_add(histograms + index * BINS + bins, 1, mask=inside, sem="relaxed")


@triton.jit
def _pick(counters, scratch, histogram, target):
    """A target's window becomes the bin that its rank falls into. If that lies beyond them, the sample misled."""
    bins = tl.arange(0, BINS)
    first = tl.load((scratch + LOWS).to(tl.pointer_type(tl.int32)) + target, cache_modifier=".cg")
    last = tl.load((scratch + HIGHS).to(tl.pointer_type(tl.int32)) + target, cache_modifier=".cg")
    rank = tl.load((scratch + RANKS).to(tl.pointer_type(tl.int64)) + target, cache_modifier=".cg")
    reached = tl.cumsum(tl.load(histogram + bins, cache_modifier=".cg").to(tl.int64), axis=0)
    picked = tl.sum((reached <= rank).to(tl.int32), axis=0)
    passed = tl.max(tl.where(bins < picked, reached, 0), axis=0)
    if picked >= BINS:
        tl.store(counters + FAILED, 1)
        picked = 0
    shift = tl.max(_shift_of(first + tl.zeros([1], tl.int32), last + tl.zeros([1], tl.int32)), axis=0).to(tl.int64)
    begin = first.to(tl.int64) + (picked.to(tl.int64) << shift)
    end = tl.minimum(begin + (tl.full([], 1, tl.int64) << shift) - 1, last.to(tl.int64))
    _store_window(scratch, target, begin.to(tl.int32), end.to(tl.int32), rank - passed)
