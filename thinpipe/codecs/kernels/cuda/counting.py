"""The one pass over a tensor: its minimum and maximum, the number of values in each interval, and the values to keep.

Up to 31 rising thresholds divide the values into intervals: the interval of a value is the number of thresholds below
it. A value is kept if it is not above the ``upper`` of its interval. Each thread stores its values in its own column.

Up to three thresholds are compared with every value one by one. The difference gives both results: its sign, if the
value is above; its magnitude, if the value is kept. The difference is rounded, so a few more values may be kept; the
search ignores them.
"""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import bits_of, greater, key_of, lesser, negative, plain, store_extent
from thinpipe.codecs.kernels.cuda.offsets import UPPERS

THREADS = tl.constexpr(256)
EACH = tl.constexpr(16)  # values of a span for a thread
SPAN = tl.constexpr(THREADS.value * EACH.value)
AT_ONCE = tl.constexpr(8)  # values of a column per part of the search
NIBBLES = tl.constexpr(0x000F000F000F000F)  # every fourth field of 4 bits
FEW_THRESHOLDS = tl.constexpr(3)  # of four buckets
NOTHING = tl.constexpr(-0x80000000)  # bits of the least difference, -0, which no value has: see ``negative``


def capacity_for_all(n: int, programs: int) -> int:
    """Return the slots of a column that hold all values which its thread reads."""
    return (n // SPAN.value // programs + 2) * EACH.value


@triton.jit
def _by_thread(span, VECTOR: tl.constexpr):
    """Reshape a span, loaded VECTOR values at a time, so that its first and last dimension are those of a thread."""
    return tl.reshape(span, [EACH // VECTOR, span.numel // EACH, VECTOR])


@triton.jit
def columns_of(span, VECTOR: tl.constexpr):
    """Return the 16 values of each thread as separate columns; no data moves between threads.

    The columns are in bit-reversed order.
    """
    rows = tl.permute(_by_thread(span, VECTOR), (1, 0, 2))
    even, odd = tl.split(tl.reshape(rows, [span.numel // EACH, 2, 2, 2, 2]))
    return _eight(even) + _eight(odd)


@triton.jit
def _eight(rows):
    even, odd = tl.split(rows)
    a, b = tl.split(even)
    c, d = tl.split(odd)
    return tl.split(a) + tl.split(b) + tl.split(c) + tl.split(d)


@triton.jit
def span_of(columns, VECTOR: tl.constexpr):
    """Return the span of such columns: the inverse of columns_of."""
    even = _joined(columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], columns[6], columns[7])
    odd = _joined(columns[8], columns[9], columns[10], columns[11], columns[12], columns[13], columns[14], columns[15])
    rows = tl.reshape(tl.join(even, odd), [columns[0].numel, EACH // VECTOR, VECTOR])
    return tl.reshape(tl.permute(rows, (1, 0, 2)), [columns[0].numel * EACH])


@triton.jit
def _joined(a, b, c, d, e, f, g, h):
    even = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.join(even, tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def _sum_of_halves(span, VECTOR: tl.constexpr):
    """Return, for each thread, the sum of eight of its values, and of the other eight."""
    halves = tl.reshape(span, [2, EACH // VECTOR // 2, THREADS, VECTOR])
    return tl.sum(tl.sum(halves, axis=3), axis=1)


@triton.jit
def _least(span, VECTOR: tl.constexpr):
    return tl.reduce(tl.reduce(_by_thread(span, VECTOR), 2, lesser), 0, lesser)


@triton.jit
def _greatest(span, VECTOR: tl.constexpr):
    return tl.reduce(tl.reduce(_by_thread(span, VECTOR), 2, greater), 0, greater)


@triton.jit
def _load_span(x, span):
    """Load a full span, with rotated places.

    Otherwise a channel full of values to keep would fill one column.
    """
    rotation = ((span * 40503) >> 3) & (SPAN - 8)
    places = (tl.arange(0, SPAN) + rotation) & (SPAN - 1)
    places = tl.max_contiguous(tl.multiple_of(places, 8), 8)
    return tl.load(x + tl.cast(span, tl.int64) * SPAN + places)


@triton.jit
def _interval_of(values, table, thresholds, INTERVALS: tl.constexpr):
    """Return the number of thresholds below each value.

    Eight intervals use a linear search; more, the quarters and then a binary search.
    """
    index = tl.zeros(values.shape, tl.int32)
    if INTERVALS == 8:
        for each in range(thresholds):
            index += negative(tl.load(table + each) - values)
    else:
        STEP: tl.constexpr = INTERVALS // 4
        for each in range(3):
            index += negative(tl.load(table + each * STEP + (STEP - 1)) - values)
        index *= STEP
        half = STEP // 2
        for _ in range(bits_of(STEP)):
            index += tl.where(values > tl.load(table + (index + (half - 1))), half, 0)
            half = half // 2
    return index


@triton.jit
def _add_counts(counts, index, VECTOR: tl.constexpr, INTERVALS: tl.constexpr):
    """Count the values of each thread per interval: eight at a time in 4-bit fields, accumulated in 16-bit fields."""
    c0, c1, c2, c3, c4, c5, c6, c7 = counts
    if INTERVALS == 8:
        once = _sum_of_halves(tl.full([SPAN], 1, tl.int32) << (index * 4), VECTOR).to(tl.uint32).to(tl.int64)
    else:
        field = ((index & 15) * 4).to(tl.int64)
        once = _sum_of_halves(tl.full([SPAN], 1, tl.int64) << field, VECTOR)
        if INTERVALS == 32:
            high = _sum_of_halves((index >> 4).to(tl.int64) << field, VECTOR)
            once -= high
            c4, c5 = c4 + _field(high, 0), c5 + _field(high, 4)
            c6, c7 = c6 + _field(high, 8), c7 + _field(high, 12)
    c0, c1 = c0 + _field(once, 0), c1 + _field(once, 4)
    c2, c3 = c2 + _field(once, 8), c3 + _field(once, 12)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _field(halves, SHIFT: tl.constexpr):
    return tl.sum((halves >> SHIFT) & NIBBLES, axis=0)


@triton.jit
def _store_counts(totals, counts, INTERVALS: tl.constexpr):
    for field in range(2 if INTERVALS == 8 else 4):
        for which in tl.static_range(8 if INTERVALS == 32 else 4):
            mine = tl.sum((counts[which] >> (16 * field)) & 0xFFFF, axis=0)
            tl.atomic_add(totals + 16 * (which // 4) + 4 * field + which % 4, mine, sem="relaxed")


@triton.jit
def are_few(table, thresholds):
    """Return True if ``_count_few`` can be used.

    It cannot keep values up to just before one that many share, nor from the least one on.
    """
    few = (thresholds <= FEW_THRESHOLDS) & (tl.load(table + UPPERS) == float("-inf"))
    for each in tl.static_range(FEW_THRESHOLDS - 1):
        end = tl.load(table + each + 1)
        followed = key_of(tl.load(table + each + 2)) - key_of(end) == 1
        few &= (tl.load(table + UPPERS + each + 1) <= end) | (followed == 0)
    return few


@triton.jit
def _limit(table, threshold):
    """Return, as bits, the greatest difference of a threshold and a value above it at which the value is kept."""
    begin, upper = tl.load(table + threshold), tl.load(table + UPPERS + threshold + 1)
    width = tl.minimum(upper, tl.load(table + threshold + 1)) - begin
    return tl.where(upper > begin, NOTHING + width.to(tl.int32, bitcast=True), NOTHING)


@triton.jit
def _count_few(values, thresholds, limits, counts, columns, held, VECTOR: tl.constexpr):
    """Count the values above each of FEW_THRESHOLDS thresholds, and store the wanted ones."""
    c0, c1, c2 = counts
    each, place = columns_of(values, VECTOR), held * THREADS
    for i in tl.static_range(EACH):
        d0, d1, d2 = thresholds[0] - each[i], thresholds[1] - each[i], thresholds[2] - each[i]
        c0, c1, c2 = c0 + negative(d0), c1 + negative(d1), c2 + negative(d2)
        wanted = _reaches(d0, limits[0]) | _reaches(d1, limits[1]) | _reaches(d2, limits[2])
        tl.store(columns + place, each[i], mask=wanted)
        place += tl.where(wanted, THREADS, 0)
    return (c0, c1, c2), place // THREADS


@triton.jit
def _reaches(difference, limit):
    return difference.to(tl.int32, bitcast=True) <= limit


@triton.jit
def _store_few_counts(totals, counts, above):
    """Add the counts of intervals to the totals.

    ``above``: the number of all values, which are those above a threshold before the first.
    """
    for threshold in tl.static_range(FEW_THRESHOLDS):
        further = tl.sum(counts[threshold].to(tl.int64), axis=0)
        tl.atomic_add(totals + threshold, above - further, sem="relaxed")
        above = further
    tl.atomic_add(totals + FEW_THRESHOLDS, above, sem="relaxed")


@triton.jit
def _keep(values, index, table, columns, held, VECTOR: tl.constexpr):
    """Store the wanted values, each in its thread's next free slot."""
    wanted = columns_of((values <= tl.load(table + UPPERS + index)).to(tl.int32), VECTOR)
    each = columns_of(values, VECTOR)
    for i in tl.static_range(EACH):
        after = held + wanted[i]
        tl.store(columns + held * THREADS, each[i], mask=after > held)
        held = after
    return held


@triton.jit
def read(x, n, table, thresholds, columns, capacity, totals, INTERVALS: tl.constexpr, MAGNITUDE: tl.constexpr):
    """Read this program's full spans; return the fill of columns, which of them lost values, and minimum and maximum.

    INTERVALS: 8, 16 or 32, more than there are thresholds; or FEW_THRESHOLDS + 1, where they ``are_few``.
    """
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # 16 bytes
    ONE_BY_ONE: tl.constexpr = INTERVALS == FEW_THRESHOLDS + 1
    zeros = tl.zeros([THREADS], tl.int32 if ONE_BY_ONE else tl.int64)
    counts = (zeros, zeros, zeros) if ONE_BY_ONE else (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    few = (tl.load(table), tl.load(table + 1), tl.load(table + 2))
    limits = (_limit(table, 0), _limit(table, 1), _limit(table, 2))
    held, lost = tl.zeros([THREADS], tl.int32), tl.zeros([THREADS], tl.int32)
    low = tl.full([THREADS], float("inf"), tl.float32)
    high = tl.full([THREADS], float("-inf"), tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    spans = tl.cast(n // SPAN, tl.int32)
    if program < spans:
        # Prefetch: two spans are loaded while the one before them is counted.
        following, last = _load_span(x, program), spans - 1
        after = _load_span(x, tl.minimum(program + programs, last))
        for span in range(program, spans, programs):
            values = plain(following, MAGNITUDE)
            following, after = after, _load_span(x, tl.minimum(span + 2 * programs, last))
            low, high = lesser(low, _least(values, VECTOR)), greater(high, _greatest(values, VECTOR))
            held, lost = _within_capacity(held, lost, capacity)
            if ONE_BY_ONE:
                counts, held = _count_few(values, few, limits, counts, columns, held, VECTOR)
            else:
                index = _interval_of(values, table, thresholds, INTERVALS)
                counts = _add_counts(counts, index, VECTOR, INTERVALS)
                held = _keep(values, index, table, columns, held, VECTOR)
    if ONE_BY_ONE:
        _store_few_counts(totals, counts, tl.cdiv(tl.maximum(spans - program, 0), programs).to(tl.int64) * SPAN)
    else:
        _store_counts(totals, counts, INTERVALS)
    return held, lost, low, high


@triton.jit
def read_rest(x, n, table, thresholds, columns, capacity, totals, extents, so_far, MAGNITUDE: tl.constexpr):
    """Read the remainder after full spans, and store the minimum and maximum of all values of this program.

    ``so_far`` is the result of ``read``; returns its first two parts, updated.
    """
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    held, lost, low, high = so_far
    there = (low <= high) | (low != low)
    spans = tl.cast(n // SPAN, tl.int32)
    if (spans % tl.num_programs(0) == tl.program_id(0)) & (n % SPAN > 0):
        places = tl.cast(spans, tl.int64) * SPAN + tl.arange(0, SPAN)
        values = plain(tl.load(x + places, mask=places < n, other=float("inf")), MAGNITUDE)
        low = lesser(low, _least(values, VECTOR))
        high = greater(high, _greatest(tl.where(places < n, values, float("-inf")), VECTOR))
        there |= tl.sum(_sum_of_halves((places < n).to(tl.int32), VECTOR), axis=0) > 0
        index = _interval_of(values, table, thresholds, 8)  # linear search: any number of thresholds
        tl.atomic_add(totals + index, tl.full([SPAN], 1, tl.int64), mask=places < n, sem="relaxed")
        values = tl.where(places < n, values, float("nan"))  # NaN is not kept
        held, lost = _within_capacity(held, lost, capacity)
        held = _keep(values, index, table, columns, held, VECTOR)
    store_extent(extents, low, high, there)
    return held, lost


@triton.jit
def _within_capacity(held, lost, capacity):
    """Empty the columns that might overflow, and mark their values as lost."""
    full = held > capacity - EACH
    return tl.where(full, 0, held), lost | full.to(tl.int32)


@triton.jit
def parts_of(n, held, use_kept):
    """Return the number of parts to search: of this program's kept values, or of its share of all values."""
    parts = tl.cdiv(tl.cdiv(n, AT_ONCE * THREADS), tl.num_programs(0)).to(tl.int32)
    return tl.where(use_kept, tl.cdiv(tl.max(held, axis=0), AT_ONCE), parts)


@triton.jit
def load_part(x, n, columns, held, part, use_kept, MAGNITUDE: tl.constexpr):
    """Load the values of one part, AT_ONCE for each column, and a mask of those that exist."""
    slots, threads = tl.arange(0, AT_ONCE)[:, None], tl.arange(0, THREADS)[None, :]
    if use_kept:
        slots += part * AT_ONCE
        there = slots < held[None, :]
        values = tl.load(columns[None, :] + slots * THREADS, mask=there, other=0.0, cache_modifier=".cg")
    else:
        span = tl.program_id(0) + tl.cast(part, tl.int64) * tl.num_programs(0)
        places = span * (AT_ONCE * THREADS) + slots * THREADS + threads
        there = places < n
        values = plain(tl.load(x + places, mask=there, other=0.0), MAGNITUDE)
    return values, there
