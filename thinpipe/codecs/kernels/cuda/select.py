"""Exact order statistics of a tensor in three launches, without sorting: those at up to 15 cuts at a time.

    1. samples say between which two values each cut almost certainly lies (sample.py). Small tensors have none
    2. the one read of the tensor: its extent, how many values lie in each interval that these values make, and the few
       between the two of a cut, kept (reading.py)
    3. of those few, the one at the wanted rank and the one after it (windows.py). If a cut was not where the samples
       said, or more was kept than there is room for, the same among all values

All programs of the first launch and of the last run at the same time and wait for each other between steps. Nothing is
known to the host. How many cuts there are is no constant of the kernels: all codecs that need order statistics share
them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codes import MOST_BUCKETS
from thinpipe.codecs.kernels.cuda.device import float_of, greater, lesser, store_extent, wait_for_all, whole_extent
from thinpipe.codecs.kernels.cuda.header import write_header
from thinpipe.codecs.kernels.cuda.places import (
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
    THRESHOLDS,
)
from thinpipe.codecs.kernels.cuda.reading import EACH, SPAN, THREADS, read
from thinpipe.codecs.kernels.cuda.windows import narrow, open_all, open_windows

LAST = tl.constexpr(MOST_BUCKETS)  # from the first values of buckets to the last ones


@triton.jit(do_not_specialize=["n", "room", "sampled"])
def read_kernel(x, n, counters, scratch, room, sampled, MAGNITUDE: tl.constexpr):
    """The read. Without a sample its extent alone is of use."""
    program = tl.program_id(0)
    table = scratch + TABLE
    thresholds = tl.load(counters + THRESHOLDS)
    columns = scratch + KEPT + program.to(tl.int64) * room * THREADS + tl.arange(0, THREADS)
    totals = (counters + INTERVAL_COUNTS).to(tl.pointer_type(tl.int64))
    if (sampled == 0) | (thresholds < 0):
        thresholds = tl.zeros([], tl.int32)
        room = EACH  # for columns that start anew with every span
        tl.store(counters + FAILED, 1)
    if thresholds < 8:
        held, lost = read(x, n, table, thresholds, columns, room, totals, scratch + EXTENTS, 8, MAGNITUDE)
    elif thresholds < 16:
        held, lost = read(x, n, table, thresholds, columns, room, totals, scratch + EXTENTS, 16, MAGNITUDE)
    else:
        held, lost = read(x, n, table, thresholds, columns, room, totals, scratch + EXTENTS, 32, MAGNITUDE)
    if tl.max(lost, axis=0) > 0:
        tl.store(counters + FAILED, 1)
    tl.store((scratch + HELD).to(tl.pointer_type(tl.int32)) + program * THREADS + tl.arange(0, THREADS), held)


@triton.jit(do_not_specialize=["n", "small", "larger", "first_cut", "cuts", "buckets", "level_bits", "zero", "room"])
def select_kernel(
    x, n, wire, counters, scratch, small, larger, first_cut, cuts, buckets, level_bits, zero, room,
    MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """The values at the ranks of cuts and those after them, into the edges; with ``buckets``, the header of the wire."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = counters + ARRIVED
    held = tl.load((scratch + HELD).to(tl.pointer_type(tl.int32)) + program * THREADS + tl.arange(0, THREADS))
    columns = scratch + KEPT + program.to(tl.int64) * room * THREADS + tl.arange(0, THREADS)
    arrivals = programs
    from_kept = tl.load(counters + FAILED, cache_modifier=".cg") == 0
    wait_for_all(arrived, arrivals)  # or one might see what another says of a failure
    again = programs > 0
    while again:
        if from_kept:
            open_windows(n, counters, scratch, small, larger, first_cut, cuts)
        else:
            open_all(n, counters, scratch, small, larger, first_cut, cuts)
        wait_for_all(arrived, arrivals + programs)
        arrivals = narrow(
            x, n, counters, scratch, columns, held, cuts, arrivals + 2 * programs, from_kept, MAGNITUDE
        )  # fmt: skip
        again = from_kept & (tl.load(counters + FAILED, cache_modifier=".cg") != 0)
        if again:
            wait_for_all(arrived, arrivals)  # or one might see the failure taken back
        from_kept = programs < 0
    if program == 0:
        cut = tl.arange(0, CUTS)
        keys = (scratch + LOWS).to(tl.pointer_type(tl.int32))
        ends = float_of(tl.load(keys + 2 * cut, cache_modifier=".cg"))
        begins = float_of(tl.load(keys + 2 * cut + 1, cache_modifier=".cg"))
        tl.store(scratch + EDGES + LAST + first_cut + cut, ends, mask=cut < cuts)
        tl.store(scratch + EDGES + 1 + first_cut + cut, begins, mask=cut < cuts)
        if buckets > 0:
            tl.debug_barrier()
            extent = whole_extent(scratch + EXTENTS)
            write_header(wire, scratch + EDGES, scratch + PARAMETERS, extent, buckets, level_bits, zero)


@triton.jit(do_not_specialize=["n", "level_bits", "zero"])
def extent_kernel(x, n, wire, counters, scratch, level_bits, zero):
    """The one bucket of a tensor without cuts: whichever program comes last writes the header."""
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
        extent = whole_extent(scratch + EXTENTS)
        write_header(wire, scratch + EDGES, scratch + PARAMETERS, extent, 1, level_bits, zero)
