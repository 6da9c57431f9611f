"""Exact order statistics of a tensor in three launches, without sorting: those at up to 15 cuts at a time.

    1. samples bracket each cut between two values that almost certainly enclose it (sample.py); small tensors have none
    2. one pass over the tensor computes its minimum and maximum, counts the values in each interval between ends,
       and keeps the few values in brackets (counting.py)
    3. a radix select finds, among the kept values, the one at the wanted rank and the one after it (radix_select.py). If a
       cut was not in its bracket, or the kept values exceeded their memory, it searches all values instead

All programs of the first launch and of the last run at the same time and synchronize at spin barriers between steps.
The host reads no result. The number of cuts is no constant of the kernels: all codecs that need order statistics share
them.
"""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codes import MOST_BUCKETS
from thinpipe.codecs.kernels.cuda.counting import EACH, FEW_THRESHOLDS, SPAN, THREADS, are_few, read, read_rest
from thinpipe.codecs.kernels.cuda.device import float_of, greater, lesser, reduce_extents, store_extent, wait_for_all
from thinpipe.codecs.kernels.cuda.header import write_header
from thinpipe.codecs.kernels.cuda.offsets import (
    ARRIVED,
    CUTS,
    EDGES,
    EXTENTS,
    FAILED,
    HELD,
    INTERVAL_COUNTS,
    KEPT,
    LOWS,
    PARAMETERS,
    TABLE,
    TARGETS,
    THRESHOLDS,
)
from thinpipe.codecs.kernels.cuda.radix_select import narrow, open_all, open_windows, rank_of_target, store_window

LAST = tl.constexpr(MOST_BUCKETS)  # offset from the first values of buckets to the last ones


@triton.jit(do_not_specialize=["n", "capacity", "sampled"])
def read_kernel(x, n, counters, scratch, capacity, sampled, MAGNITUDE: tl.constexpr):
    """Run the one pass over the tensor. Without a sample only its minimum and maximum are used."""
    program = tl.program_id(0)
    table = scratch + TABLE
    thresholds = tl.load(counters + THRESHOLDS)
    columns = scratch + KEPT + program.to(tl.int64) * capacity * THREADS + tl.arange(0, THREADS)
    totals = (counters + INTERVAL_COUNTS).to(tl.pointer_type(tl.int64))
    if (sampled == 0) | (thresholds < 0):
        thresholds = tl.zeros([], tl.int32)
        capacity = EACH  # columns start anew with every span
        tl.store(counters + FAILED, 1)
    if are_few(table, thresholds):
        so_far = read(x, n, table, thresholds, columns, capacity, totals, FEW_THRESHOLDS + 1, MAGNITUDE)
    elif MAGNITUDE | (thresholds < 8):  # of magnitudes there is one cut, with five thresholds at most
        so_far = read(x, n, table, thresholds, columns, capacity, totals, 8, MAGNITUDE)
    elif thresholds < 16:
        so_far = read(x, n, table, thresholds, columns, capacity, totals, 16, MAGNITUDE)
    else:
        so_far = read(x, n, table, thresholds, columns, capacity, totals, 32, MAGNITUDE)
    held, lost = read_rest(x, n, table, thresholds, columns, capacity, totals, scratch + EXTENTS, so_far, MAGNITUDE)
    if tl.max(lost, axis=0) > 0:
        tl.store(counters + FAILED, 1)
    tl.store((scratch + HELD).to(tl.pointer_type(tl.int32)) + program * THREADS + tl.arange(0, THREADS), held)


def header_number(buckets: int, level_bits: int, zero: bool) -> int:
    """Return the parameters of the header packed into one number for select_kernel; 0: there is none to write."""
    return buckets << 8 | level_bits << 1 | int(zero)


@triton.jit(do_not_specialize=["n", "small", "larger", "first_cut", "cuts", "header", "capacity"])
def select_kernel(
    x, n, wire, counters, scratch, small, larger, first_cut, cuts, header, capacity, MAGNITUDE: tl.constexpr
):
    """Store the values at and after the ranks of cuts in the edges; write the header of the wire, if there is one."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED
    held = tl.load((scratch + HELD).to(tl.pointer_type(tl.int32)) + program * THREADS + tl.arange(0, THREADS))
    columns = scratch + KEPT + program.to(tl.int64) * capacity * THREADS + tl.arange(0, THREADS)
    ranks = rank_of_target(tl.arange(0, TARGETS), n, small, larger, first_cut)
    use_kept = tl.load(counters + FAILED) == 0
    retry, arrivals = programs > 0, programs
    while retry:
        opened = open_windows(counters, scratch + TABLE, ranks)
        if use_kept == 0:
            opened = open_all(n, counters, ranks)
            wait_for_all(arrived, arrivals)
            arrivals += programs
        empty = (tl.arange(0, TARGETS) < 2 * cuts) & (opened[1] < opened[0])
        missed = tl.max(empty.to(tl.int32), axis=0) > 0
        if program == 0:
            store_window(scratch, tl.arange(0, TARGETS), opened[0], opened[1], opened[2], opened[3])
            tl.debug_barrier()
        if missed == 0:
            arrivals = narrow(
                x, n, counters, scratch, columns, held, opened, cuts, arrivals, use_kept, MAGNITUDE
            )  # fmt: skip
        retry = use_kept & (missed | (tl.load(counters + FAILED, cache_modifier=".cg") != 0))
        if retry:
            wait_for_all(arrived, arrivals)  # otherwise a program might read FAILED after open_all has cleared it
            arrivals += programs
        use_kept = programs < 0
    if program == 0:
        cut = tl.arange(0, CUTS)
        keys = (scratch + LOWS).to(tl.pointer_type(tl.int32))
        ends = float_of(tl.load(keys + 2 * cut, cache_modifier=".cg"))
        begins = float_of(tl.load(keys + 2 * cut + 1, cache_modifier=".cg"))
        tl.store(scratch + EDGES + LAST + first_cut + cut, ends, mask=cut < cuts)
        tl.store(scratch + EDGES + 1 + first_cut + cut, begins, mask=cut < cuts)
        if header > 0:
            tl.debug_barrier()
            extent = reduce_extents(scratch + EXTENTS)
            level_bits = (header >> 1) & 127
            write_header(wire, scratch + EDGES, scratch + PARAMETERS, extent, header >> 8, level_bits, header & 1)


@triton.jit(do_not_specialize=["n", "level_bits", "zero"])
def extent_kernel(x, n, wire, counters, scratch, level_bits, zero):
    """Find the one bucket of a tensor without cuts; the last program to finish writes the header."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    low = tl.full([SPAN], float("inf"), tl.float32)
    high = tl.full([SPAN], float("-inf"), tl.float32)
    lanes = tl.arange(0, SPAN)
    spans = tl.cast(n // SPAN, tl.int32)
    for span in range(program, spans, programs):
        values = tl.load(x + tl.cast(span, tl.int64) * SPAN + lanes).to(tl.float32)
        low, high = lesser(low, values), greater(high, values)
    if spans % programs == program:
        places = tl.cast(spans, tl.int64) * SPAN + lanes
        values = tl.load(x + places, mask=places < n, other=0.0).to(tl.float32)
        low = tl.where(places < n, lesser(low, values), low)
        high = tl.where(places < n, greater(high, values), high)
    there = (low <= high) | (low != low)
    store_extent(scratch + EXTENTS, low, high, there)
    tl.debug_barrier()
    if tl.atomic_add(counters + ARRIVED, 1, sem="acq_rel", scope="gpu") == programs - 1:
        extent = reduce_extents(scratch + EXTENTS)
        write_header(wire, scratch + EDGES, scratch + PARAMETERS, extent, 1, level_bits, zero)
