"""The one read of a tensor: its extent, counts around brackets, and the few values inside them, kept."""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import (
    COLUMNS,
    ROWS,
    TILE,
    hidden_one,
    load_values,
    negative,
    single_columns,
)
from thinpipe.codecs.kernels.cuda.narrow import load_kept
from thinpipe.codecs.kernels.cuda.places import MOST_PROGRAMS, SUMS


@triton.jit
def _read_values(
    values, there, columns, held, low, high, above0, above1, above2, tie0, tie1, tie2, tie3, tie4, tie5,
    lo0, hi0, lo1, hi1, lo2, hi2, lo_tie, hi_tie,
    CUTS_HERE: tl.constexpr, TIES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One value for every column: extent, counts, and if it is inside a bracket, to the column's next free slot.

    Comparisons are signs of differences, which cost half as much to count and to combine. Once a value is NaN, so is
    the extent. Integer instructions limit the speed: a slot's address is multiplied out where floats are computed, and
    the mask follows from how full the column is, or the compiler would pack the masks of 16 values into a word.
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
        held_after = held + negative(inside)
        bytes_on = (held * (4 * COLUMNS * hidden_one())).to(tl.uint32, bitcast=True)
        slot = (columns.to(tl.int64) + bytes_on.to(tl.int64)).to(tl.pointer_type(tl.float32))
        tl.store(slot, values, mask=held_after > held)
        held = held_after
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
def _load_tile(x, n, tile, MAGNITUDE: tl.constexpr):
    places = tl.cast(tile, tl.int64) * TILE + tl.arange(0, ROWS)[None, :] * COLUMNS + single_columns()[:, None]
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
