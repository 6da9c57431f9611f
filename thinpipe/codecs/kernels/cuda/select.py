"""Exact order statistics of a tensor in one launch, without sorting: up to three cuts of a tensor at a time.

    1. samples say between which two values each cut almost certainly lies (brackets.py)
    2. the one read of the tensor: how many values reach up to each bracket, how many are equal to an end that many
       share (half of a ReLU's output is 0), the extent, and the few values strictly inside the brackets (reading.py)
    3. of those few, the ones next to the cut are listed and ranked: the value at the wanted rank, exactly, and the one
       after it (narrow.py). Where that is not possible, keys are counted by their bits (search.py)
    4. if a bracket did not hold its cut, or held more than there was room for, the whole tensor is searched that way:
       slower by far, and always right. Small tensors go there at once

All programs of the launch run at the same time and wait for each other between the steps, so that a tensor of any
size costs one launch and nothing is known to the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.brackets import SAMPLE, brackets, count_sample, draw, of_cut, rank_sample
from thinpipe.codecs.kernels.cuda.device import (
    COLUMNS,
    bucket_affine,
    float_of,
    store_bytes,
    wait_for_all,
    whole_extent,
)
from thinpipe.codecs.kernels.cuda.narrow import NO_KEY, collect, count_bins, overflown, pick_bins, possible, rank_lists
from thinpipe.codecs.kernels.cuda.places import (
    ARRIVED,
    BRACKET_COUNTS,
    DONE,
    DRAWN,
    EDGES,
    EXTENTS,
    FAILED,
    FOUND,
    LENGTHS,
    LISTED_KEY,
    LISTS,
    LOW_KEY,
    NEXT_KEY,
    PARAMETERS,
    PARTIALS,
    PICKED,
    RANK,
    SPLITTER_VALUES,
    UP_TO,
    WORDS,
)
from thinpipe.codecs.kernels.cuda.reading import read
from thinpipe.codecs.kernels.cuda.search import all_done, begin, count_all, pick_bin, search_everything, take_high_end


@triton.jit(do_not_specialize=["n", "rank0", "rank1", "rank2", "first_cut", "levels", "room"])
def select_kernel(
    x, n, wire, counters, scratch, rank0, rank1, rank2, first_cut, levels, size, room,
    CUTS_HERE: tl.constexpr, BUCKETS: tl.constexpr, LAST: tl.constexpr, SAMPLED: tl.constexpr, MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """The values at up to three ranks and those after them, into the edges; the last launch of a tensor finishes."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    ranks = (rank0, rank1, rank2)
    found = (scratch + FOUND).to(tl.pointer_type(tl.int64))
    partials = (scratch + PARTIALS).to(tl.pointer_type(tl.int64))
    extents = scratch + EXTENTS
    if SAMPLED:
        failed, quick, arrivals = _select_sampled(x, n, counters, scratch, ranks, size, room, CUTS_HERE, MAGNITUDE)
    else:
        nan = float("nan")
        read(x, n, scratch, 0, partials, extents, ((nan, nan, nan), (nan, nan, nan), (nan, nan)), 0, 0, MAGNITUDE)
        wait_for_all(counters + ARRIVED, programs)
        arrivals = 2 * programs
        failed = 1
        quick = False
    if CUTS_HERE > 0:
        if failed != 0:
            search_everything(x, n, counters, found, arrivals, ranks, CUTS_HERE, MAGNITUDE)
    if program == 0:
        _store_edges(scratch + EDGES, found, quick, n, ranks, first_cut, CUTS_HERE, BUCKETS)
        if LAST:
            tl.debug_barrier()
            _finish(wire, scratch + EDGES, scratch + PARAMETERS, extents, levels, BUCKETS)


@triton.jit
def _select_sampled(x, n, counters, scratch, ranks, size, room, CUTS_HERE: tl.constexpr, MAGNITUDE: tl.constexpr):
    """Steps 1 to 3: whether a bracket failed, whether lists were ranked, and the arrivals to wait for next."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED
    arrivals = programs
    found = (scratch + FOUND).to(tl.pointer_type(tl.int64))
    partials = (scratch + PARTIALS).to(tl.pointer_type(tl.int64))
    drawn = scratch + DRAWN
    splitters = scratch + SPLITTER_VALUES
    store = drawn + SAMPLE + tl.maximum(size, LISTS) + program.to(tl.int64) * room * COLUMNS
    draw(x, n, size, drawn + SAMPLE, program, MAGNITUDE)
    draw(x, n, SAMPLE, drawn, programs - 1 - program, MAGNITUDE)  # by those that have least of the other
    wait_for_all(arrived, arrivals)
    rank_sample(drawn, splitters, n, ranks)
    wait_for_all(arrived, arrivals + programs)
    count_sample(drawn + SAMPLE, size, splitters, counters)
    wait_for_all(arrived, arrivals + 2 * programs)
    arrivals += 3 * programs
    lows, highs, shared, ties = brackets(splitters, counters, size, n, ranks)
    held, lost = _read_with_ties(
        x, n, store, room, partials, scratch + EXTENTS, (lows, highs, shared), ties, CUTS_HERE, MAGNITUDE
    )
    slots = tl.max(held, axis=0)
    if tl.max(lost, axis=0) > 0:
        tl.store(counters + FAILED, 1)
    quick = possible(lows, highs, CUTS_HERE)
    picked, lengths = counters + PICKED, counters + LENGTHS
    lists = drawn + SAMPLE  # where the larger sample was
    if quick:
        tl.debug_barrier()  # what other threads of this program have kept
        count_bins(store, held, slots, counters + BRACKET_COUNTS, lows, highs, CUTS_HERE)
    wait_for_all(arrived, arrivals)
    for cut in range(program, CUTS_HERE, programs):
        row = found + cut * WORDS
        rank = of_cut(cut, ranks)
        low, high = of_cut(cut, lows), of_cut(cut, highs)
        begin(counters, row, partials, n, rank, low, high, ties, shared[0], cut)
        if quick:
            tl.store(row + LISTED_KEY, tl.full([], NO_KEY, tl.int64))
            tl.debug_barrier()
            among = tl.load(row + RANK, cache_modifier=".cg")
            if pick_bins(counters + BRACKET_COUNTS, picked, among, cut) <= among:
                take_high_end(counters, row, partials, n, rank, high, ties, shared[1], cut)
    wait_for_all(arrived, arrivals + programs)
    arrivals += 2 * programs
    if quick:
        collect(store, held, slots, picked, lengths, lists, lows, highs, CUTS_HERE)
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
        count_all(x, n, store, held, slots, counters, found, CUTS_HERE, True, MAGNITUDE)
        wait_for_all(arrived, arrivals)
        for cut in range(program, CUTS_HERE, programs):
            row = found + cut * WORDS
            if tl.load(row + DONE, cache_modifier=".cg") == 0:
                if pick_bin(counters, row, cut) == 0:
                    rank, high = of_cut(cut, ranks), of_cut(cut, highs)
                    take_high_end(counters, row, partials, n, rank, high, ties, shared[1], cut)
        wait_for_all(arrived, arrivals + programs)
        arrivals += 2 * programs
        failed = tl.load(counters + FAILED, cache_modifier=".cg")
        again = (failed == 0) & (all_done(found, CUTS_HERE) == 0)
    return failed, quick, arrivals


@triton.jit
def _read_with_ties(
    x, n, store, room, partials, extents, brackets, ties, CUTS_HERE: tl.constexpr, MAGNITUDE: tl.constexpr
):
    """The read, in one of three forms: nothing shared, one end of each kind, or all ends counted apart."""
    if ties == 0:
        held, lost = read(x, n, store, room, partials, extents, brackets, CUTS_HERE, 0, MAGNITUDE)
    elif ties < 3:
        held, lost = read(x, n, store, room, partials, extents, brackets, CUTS_HERE, 2, MAGNITUDE)
    else:
        held, lost = read(x, n, store, room, partials, extents, brackets, CUTS_HERE, 6, MAGNITUDE)
    return held, lost


@triton.jit
def _store_edges(edges, found, quick, n, ranks, first_cut, CUTS_HERE: tl.constexpr, BUCKETS: tl.constexpr):
    """The value at a cut's rank ends a bucket; the value after it begins the next one."""
    for cut in tl.static_range(CUTS_HERE):
        row = found + cut * WORDS
        value = float_of(tl.load(row + LOW_KEY, cache_modifier=".cg").to(tl.int32))
        after_key = tl.load(row + NEXT_KEY, cache_modifier=".cg")
        if quick:
            listed = tl.load(row + LISTED_KEY, cache_modifier=".cg")
            after_key = tl.where(listed == NO_KEY, after_key, listed)
        after = float_of(after_key.to(tl.int32))
        same = tl.load(row + UP_TO, cache_modifier=".cg") > tl.minimum(ranks[cut] + 1, n - 1)
        tl.store(edges + BUCKETS + first_cut + cut, value)
        tl.store(edges + 1 + first_cut + cut, tl.where(same, value, after))


@triton.jit
def _finish(wire, edges, parameters, extents, levels, BUCKETS: tl.constexpr):
    """From the edges of all buckets: the header of the wire, and what a value is quantized with in each bucket.

    As thinpipe.codecs.layout.bucket_affine has it. NaN or infinity anywhere: a header of NaN, and codes 0.
    """
    low, high, odd = whole_extent(extents)
    finite = odd == 0
    buckets = tl.arange(0, BUCKETS)
    lo = tl.load(edges + buckets, mask=buckets > 0, other=0.0, cache_modifier=".cg")
    hi = tl.load(edges + BUCKETS + buckets, mask=buckets < BUCKETS - 1, other=0.0, cache_modifier=".cg")
    lo = tl.where(finite, tl.where(buckets == 0, low, lo), float("nan"))
    hi = tl.where(finite, tl.where(buckets == BUCKETS - 1, high, hi), float("nan"))
    store_bytes(wire, buckets, lo)
    store_bytes(wire + 4 * BUCKETS, buckets, hi)
    if BUCKETS == 1:
        padding = tl.arange(0, 2)
        store_bytes(wire + 8, padding, tl.zeros([2], tl.float32))
    factor, offset, scale = bucket_affine(lo, hi, levels)
    tl.store(parameters + buckets, tl.where(finite, hi, float("inf")) + 0.0)  # never -0, see negative
    tl.store(parameters + BUCKETS + buckets, factor)
    tl.store(parameters + 2 * BUCKETS + buckets, tl.where(finite, offset, 0.0))
    tl.store(parameters + 3 * BUCKETS + buckets, tl.where(finite, scale, 0.0))
