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

from thinpipe.codecs.kernels.cuda.brackets import (
    SAMPLE,
    add_tie,
    bracket,
    count_sample,
    draw,
    larger_sample,
    rank_sample,
)
from thinpipe.codecs.kernels.cuda.device import (
    COLUMNS,
    ROWS,
    TILE,
    bucket_affine,
    float_of,
    store_bytes,
    wait_for_all,
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
    MOST_PROGRAMS,
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
from thinpipe.codecs.kernels.cuda.search import (
    all_done,
    begin,
    count_all,
    of_cut,
    pick_bin,
    search_everything,
    take_high_end,
)


def slots_per_column(n: int, programs: int) -> int:
    """Room for kept values: for all of a small tensor, else for three times as many as expected."""
    most = (n // TILE.value // programs + 2) * ROWS.value
    return min(most, 96 + most // 10)


def scratch_floats(n: int, programs: int, sampled: bool) -> int:
    kept = (
        max(larger_sample(n), LISTS.value) + slots_per_column(n, programs) * COLUMNS.value * programs if sampled else 0
    )
    return DRAWN.value + SAMPLE.value + kept


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
        draw(x, n, size, drawn + SAMPLE, program, MAGNITUDE)
        draw(x, n, SAMPLE, drawn, programs - 1 - program, MAGNITUDE)  # by those that have least of the other
        wait_for_all(arrived, arrivals)
        rank_sample(drawn, splitters, n, rank0, rank1, rank2)
        wait_for_all(arrived, arrivals + programs)
        count_sample(drawn + SAMPLE, size, splitters, counters)
        wait_for_all(arrived, arrivals + 2 * programs)
        arrivals += 3 * programs
        lo0, hi0, lo0_shared, hi0_shared = bracket(splitters, counters, size, n, rank0, 0)
        lo1, hi1, lo1_shared, hi1_shared = bracket(splitters, counters, size, n, rank1, 1)
        lo2, hi2, lo2_shared, hi2_shared = bracket(splitters, counters, size, n, rank2, 2)
        # One lower and one upper end that many values share are counted apart; if there are more, all ends are.
        lo_tie, lo_ties = add_tie(lo0, 0, lo0, lo0_shared)
        lo_tie, lo_ties = add_tie(lo_tie, lo_ties, lo1, lo1_shared)
        lo_tie, lo_ties = add_tie(lo_tie, lo_ties, lo2, lo2_shared)
        hi_tie, hi_ties = add_tie(hi0, 0, hi0, hi0_shared & (hi0 != lo0))
        hi_tie, hi_ties = add_tie(hi_tie, hi_ties, hi1, hi1_shared & (hi1 != lo1))
        hi_tie, hi_ties = add_tie(hi_tie, hi_ties, hi2, hi2_shared & (hi2 != lo2))
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
            rank = of_cut(cut, rank0, rank1, rank2)
            low, high = of_cut(cut, lo0, lo1, lo2), of_cut(cut, hi0, hi1, hi2)
            begin(counters, row, partials, n, rank, low, high, ties, lo_tie, cut)
            if quick:
                tl.store(row + LISTED_KEY, tl.full([], NO_KEY, tl.int64))
                tl.debug_barrier()
                among = tl.load(row + RANK, cache_modifier=".cg")
                if pick_bins(counters + BRACKET_COUNTS, picked, among, cut) <= among:
                    take_high_end(counters, row, partials, n, rank, high, ties, hi_tie, cut)
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
            count_all(x, n, store, held, slots, counters, found, CUTS_HERE, True, MAGNITUDE)
            wait_for_all(arrived, arrivals)
            for cut in range(program, CUTS_HERE, programs):
                row = found + cut * WORDS
                if tl.load(row + DONE, cache_modifier=".cg") == 0:
                    if pick_bin(counters, row, cut) == 0:
                        rank = of_cut(cut, rank0, rank1, rank2)
                        high = of_cut(cut, hi0, hi1, hi2)
                        take_high_end(counters, row, partials, n, rank, high, ties, hi_tie, cut)
            wait_for_all(arrived, arrivals + programs)
            arrivals += 2 * programs
            failed = tl.load(counters + FAILED, cache_modifier=".cg")
            again = (failed == 0) & (all_done(found, CUTS_HERE) == 0)
    else:
        nan = float("nan")
        read(x, n, scratch, 0, partials, extents, nan, nan, nan, nan, nan, nan, nan, nan, 0, 0, MAGNITUDE)  # fmt: skip
        wait_for_all(arrived, arrivals)
        arrivals += programs
        failed = 1
        quick = False
    if CUTS_HERE > 0:
        if failed != 0:
            search_everything(x, n, counters, found, arrivals, rank0, rank1, rank2, CUTS_HERE, MAGNITUDE)
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
        rank = of_cut(cut, rank0, rank1, rank2)
        same = tl.load(row + UP_TO, cache_modifier=".cg") > tl.minimum(rank + 1, n - 1)
        tl.store(edges + CHUNKS + first_cut + cut, value)
        tl.store(edges + 1 + first_cut + cut, tl.where(same, value, after))


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
