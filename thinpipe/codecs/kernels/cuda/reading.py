"""The one read of a tensor: its extent, counts around brackets, and the few values inside them, kept.

Brackets are three tuples: the lower ends of all cuts, the upper ends, and the lower and the upper end that many values
share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import (
    COLUMNS,
    MOST_PROGRAMS,
    ROWS,
    SPAN,
    hidden_one,
    load_values,
    negative,
    single_columns,
)
from thinpipe.codecs.kernels.cuda.places import SUMS


def room_for_all(n: int, programs: int) -> int:
    """Slots of a column that hold all values which its thread reads."""
    return (n // SPAN.value // programs + 2) * ROWS.value


@triton.jit
def _difference(a, b, there, MASKED: tl.constexpr):
    """The bits of a - b: the highest says whether a is below b. 0 where there is no value."""
    bits = (a - b).to(tl.int32, bitcast=True)
    if MASKED:
        bits = tl.where(there, bits, 0)
    return bits


@triton.jit
def _count_ties(values, there, ties, brackets, TIES: tl.constexpr, MASKED: tl.constexpr):
    """Values below lower ends and above upper ends: of the two ends that many share, or of all."""
    lows, highs, shared = brackets
    tie0, tie1, tie2, tie3, tie4, tie5 = ties
    if TIES == 2:
        tie0 += negative(_difference(values, shared[0], there, MASKED))
        tie1 += negative(_difference(shared[1], values, there, MASKED))
    if TIES == 6:
        tie0 += negative(_difference(values, lows[0], there, MASKED))
        tie1 += negative(_difference(highs[0], values, there, MASKED))
        tie2 += negative(_difference(values, lows[1], there, MASKED))
        tie3 += negative(_difference(highs[1], values, there, MASKED))
        tie4 += negative(_difference(values, lows[2], there, MASKED))
        tie5 += negative(_difference(highs[2], values, there, MASKED))
    return tie0, tie1, tie2, tie3, tie4, tie5


@triton.jit
def _read_values(
    values, there, columns, held, extent, above, ties, brackets,
    CUTS_HERE: tl.constexpr, TIES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One value for every column: extent, counts, and if it is inside a bracket, to the column's next free slot.

    Comparisons are signs of differences, which cost half as much to count and to combine. Once a value is NaN, so is
    the extent. Integer instructions limit the speed: a slot's address is multiplied out where floats are computed, and
    the mask follows from how full the column is, or the compiler would pack the masks of 16 values into a word.
    """
    low, high = extent
    if MASKED:
        low = tl.minimum(low, tl.where(there, values, float("inf")), propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, tl.where(there, values, float("-inf")), propagate_nan=tl.PropagateNan.ALL)
        values = tl.where(there, values, 0.0)
    else:
        low = tl.minimum(low, values, propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, values, propagate_nan=tl.PropagateNan.ALL)
    if CUTS_HERE > 0:
        lows, highs, _ = brackets
        above0, above1, above2 = above
        over = _difference(lows[0], values, there, MASKED)
        above0 += negative(over)
        inside = over & _difference(values, highs[0], there, MASKED)
        if CUTS_HERE > 1:
            over = _difference(lows[1], values, there, MASKED)
            above1 += negative(over)
            inside |= over & _difference(values, highs[1], there, MASKED)
        if CUTS_HERE > 2:
            over = _difference(lows[2], values, there, MASKED)
            above2 += negative(over)
            inside |= over & _difference(values, highs[2], there, MASKED)
        above = (above0, above1, above2)
        ties = _count_ties(values, there, ties, brackets, TIES, MASKED)
        held_after = held + negative(inside)
        bytes_on = (held * (4 * COLUMNS * hidden_one())).to(tl.uint32, bitcast=True)
        slot = (columns.to(tl.int64) + bytes_on.to(tl.int64)).to(tl.pointer_type(tl.float32))
        tl.store(slot, values, mask=held_after > held)
        held = held_after
    return held, (low, high), above, ties


@triton.jit
def _read_quarter(values, columns, held, extent, above, ties, brackets, CUTS_HERE: tl.constexpr, TIES: tl.constexpr):
    """Four values for every column, which a thread has loaded at once."""
    pairs = tl.reshape(values, [COLUMNS, 2, 2])
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    parts = (first, second, third, fourth)
    for part in tl.static_range(4):
        held, extent, above, ties = _read_values(
            parts[part], None, columns, held, extent, above, ties, brackets, CUTS_HERE, TIES, False
        )
    return held, extent, above, ties


@triton.jit
def _load_quarter(x, span, quarter: tl.constexpr, MAGNITUDE: tl.constexpr):
    """A quarter of a whole span. Places are rotated, or a channel full of kept values would fill one column."""
    MANY: tl.constexpr = SPAN // 4
    rotation = ((span * 40503) >> 3) & (MANY - 8)
    places = (tl.arange(0, MANY) + rotation) & (MANY - 1)
    places = tl.max_contiguous(tl.multiple_of(places, 8), 8) + quarter * MANY
    return load_values(x + tl.cast(span, tl.int64) * SPAN, places, None, MAGNITUDE)


@triton.jit
def _load_quarters(x, span, MAGNITUDE: tl.constexpr):
    return (
        _load_quarter(x, span, 0, MAGNITUDE),
        _load_quarter(x, span, 1, MAGNITUDE),
        _load_quarter(x, span, 2, MAGNITUDE),
        _load_quarter(x, span, 3, MAGNITUDE),
    )


@triton.jit
def _make_room(held, lost, room):
    """A column that might overflow starts anew, and what it held is lost."""
    full = held > room - ROWS
    lost |= full.to(tl.int32)
    return tl.where(full, 0, held), lost


@triton.jit
def _nothing():
    return tl.zeros([COLUMNS], tl.int32)


@triton.jit
def read(
    x, n, store, room, partials, extents, brackets,
    CUTS_HERE: tl.constexpr, TIES: tl.constexpr, MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """This program's part of the tensor: stores its counts and extent, returns how full each column is, and losses."""
    held, lost = _nothing(), _nothing()
    extent = (tl.full([COLUMNS], float("inf"), tl.float32), tl.full([COLUMNS], float("-inf"), tl.float32))
    above = (_nothing(), _nothing(), _nothing())
    ties = (_nothing(), _nothing(), _nothing(), _nothing(), _nothing(), _nothing())
    columns = store + tl.arange(0, COLUMNS)
    program = tl.program_id(0)
    spans = tl.cast(n // SPAN, tl.int32)
    if program < spans:
        # A span is under way while the one before it is counted.
        following = _load_quarters(x, program, MAGNITUDE)
        for span in range(program, spans, tl.num_programs(0)):
            quarters = following
            following = _load_quarters(x, tl.minimum(span + tl.num_programs(0), spans - 1), MAGNITUDE)
            held, lost = _make_room(held, lost, room)
            for quarter in tl.static_range(4):
                held, extent, above, ties = _read_quarter(
                    quarters[quarter], columns, held, extent, above, ties, brackets, CUTS_HERE, TIES
                )
    if spans % tl.num_programs(0) == program:
        held, lost = _make_room(held, lost, room)
        for start in range(tl.cast(spans, tl.int64) * SPAN, n, COLUMNS):
            places = start + tl.arange(0, COLUMNS)
            values = load_values(x, places, places < n, MAGNITUDE)
            held, extent, above, ties = _read_values(
                values, places < n, columns, held, extent, above, ties, brackets, CUTS_HERE, TIES, True
            )
    _store_extent(extents + program, extent)
    _store_sums(partials + SUMS * program, above, ties, CUTS_HERE, TIES)
    return held, lost


@triton.jit
def _store_extent(mine, extent):
    low, high = extent
    untouched = (low == float("inf")) & (high == float("-inf"))
    tl.store(mine, tl.min(low, axis=0))
    tl.store(mine + MOST_PROGRAMS, tl.max(high, axis=0))
    tl.store(mine + 2 * MOST_PROGRAMS, tl.sum(tl.where(untouched, 0.0, low * 0.0 + high * 0.0), axis=0))


@triton.jit
def _store_sums(mine, above, ties, CUTS_HERE: tl.constexpr, TIES: tl.constexpr):
    if CUTS_HERE > 0:
        for cut in tl.static_range(3):
            tl.store(mine + cut, tl.sum(above[cut].to(tl.int64), axis=0))
    for tie in tl.static_range(TIES):
        tl.store(mine + 4 + tie, tl.sum(ties[tie].to(tl.int64), axis=0))


@triton.jit
def load_kept(store, held, start):
    """The kept values of ROWS slots of every column, and which of them there are."""
    slots = start + tl.arange(0, ROWS)[None, :]
    there = slots < held[:, None]
    places = slots * COLUMNS + single_columns()[:, None]
    return tl.load(store + places, mask=there, other=0.0, cache_modifier=".cg"), there


@triton.jit
def _load_span(x, n, span, MAGNITUDE: tl.constexpr):
    places = tl.cast(span, tl.int64) * SPAN + tl.arange(0, ROWS)[None, :] * COLUMNS + single_columns()[:, None]
    there = places < n
    return load_values(x, places, there, MAGNITUDE), there


@triton.jit
def load_part(x, n, store, held, part, KEPT: tl.constexpr, MAGNITUDE: tl.constexpr):
    """A part of what is searched: of the kept values, or of the whole tensor."""
    if KEPT:
        return load_kept(store, held, part * ROWS)
    else:
        return _load_span(x, n, tl.program_id(0) + part * tl.num_programs(0), MAGNITUDE)


@triton.jit
def parts(n, slots, KEPT: tl.constexpr):
    """How many parts a program searches."""
    if KEPT:
        return tl.cdiv(slots, ROWS)
    else:
        return tl.cast(tl.cdiv(tl.cdiv(n, SPAN), tl.num_programs(0)), tl.int32)
