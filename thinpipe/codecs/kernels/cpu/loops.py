"""The compiled loops: numba, one thread's share each, blocks small enough for the first-level cache.

All of them live in this one file because numba's cache between runs watches only the file a function is in: a loop
here that called one elsewhere would keep running the old one after it changed.

Values are compared through keys: the bits of a float32 as an int32, negative ones with all but the sign flipped, so
that integer order is the order of the floats (-0 just below +0, infinities at the ends, NaN beyond them).
    1.0 -> 0x3f800000 -> key 1065353216        -1.0 -> 0xbf800000 -> key -1065353217

Arrays say by their type what they hold: float32 and float64 themselves, int16 the bits of bfloat16, uint16 the bits
of float16, int32 keys. Integer arithmetic that should stay narrow enough for SIMD is cast back at every step, because
numba widens it to 64 bits.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.layout import (
    BFLOAT16_MAX,
    BLOCK,
    PIECE,
    PIECES,
    TILE_HUGE,
    TILE_LEAST_STEP,
    TILE_UNIT,
)

_MAGNITUDE = np.int32(0x7FFFFFFF)
_GREATEST = np.int32(0x7FFFFFFE)  # one NaN is lowered to this, so that a key below 0x7FFFFFFF is every key
_HALF_REBIAS = np.float32(2.0**112)  # float16 bits moved to a float32's place are too small by this

_INFINITY = np.int32(0x7F800000)
_FLOAT32_MAX = np.float32(np.finfo(np.float32).max)

_BFLOAT16_MAX = np.float32(BFLOAT16_MAX)
_NAN_WORD = np.uint16(0x7FC0)  # bfloat16's
_TILE_HUGE = np.float32(TILE_HUGE)
_TILE_UNIT = np.float32(TILE_UNIT)
_TILE_LEAST_STEP = np.float32(TILE_LEAST_STEP).view(np.int32)
_HALF = np.float32(0.5)
_DRAW = np.float32(2.0**-24)


def _load(x, start, count, block):
    raise AssertionError("compiled only")


@overload(_load, jit_options={"error_model": "numpy"})
def _load_by_type(x, start, count, block):
    """Values start..start+count of x as float32: a view where they are that already, else converted into block."""
    if x.dtype == types.float32:
        return lambda x, start, count, block: x[start : start + count]
    if x.dtype == types.float64:

        def from_double(x, start, count, block):
            for j in range(count):
                block[j] = np.float32(x[start + j])
            return block[:count]

        return from_double
    if x.dtype == types.int16:

        def from_bfloat16(x, start, count, block):
            bits = block.view(np.int32)
            for j in range(count):
                bits[j] = np.int32(np.int32(x[start + j]) << 16)
            return block[:count]

        return from_bfloat16
    if x.dtype == types.uint16:

        def from_float16(x, start, count, block):
            bits = block.view(np.int32)
            for j in range(count):
                bits[j] = np.int32((x[start + j] & 0x7FFF) << 13)
            for j in range(count):
                block[j] *= _HALF_REBIAS
            for j in range(count):
                half = np.int32(x[start + j])
                special = np.int32(0x7F800000) if (half & 0x7C00) == 0x7C00 else np.int32(0)
                bits[j] = np.int32(bits[j] | special | np.int32((half & 0x8000) << 16))
            return block[:count]

        return from_float16
    return None


@jit
def _bits(x):
    """A float32 as an int32. In functions of their own, because numba views only variables that are set once."""
    return np.float32(x).view(np.int32)


@jit
def _float(bits):
    return np.int32(bits).view(np.float32)


def _store(values, out):
    raise AssertionError("compiled only")


@overload(_store, jit_options={"error_model": "numpy"})
def _store_by_type(values, out):
    """The inverse of _load: float32 values rounded to out's type, halfway to even."""
    if out.dtype == types.int16:

        def to_bfloat16(values, out):
            bits = values.view(np.int32)
            for j in range(values.size):
                rounded = np.int32(bits[j] + np.int32(0x7FFF + ((bits[j] >> 16) & 1))) >> 16
                out[j] = np.int16(rounded if values[j] == values[j] else 0x7FC0)

        return to_bfloat16
    if out.dtype == types.uint16:

        def to_float16(values, out):
            bits = values.view(np.int32)
            for j in range(values.size):
                size = np.int32(bits[j] & _MAGNITUDE)
                # Below 2^-14 half floats lie as far apart as float32 from 0.5 on: adding that rounds.
                small = np.int32(_bits(abs(values[j]) + _HALF) - _bits(_HALF))
                normal = np.int32(size + np.int32(0xFFF + ((size >> 13) & 1)) - (112 << 23)) >> 13
                half = small if size < (113 << 23) else normal
                half = half if size < (143 << 23) else np.int32(0x7C00)
                half = half if values[j] == values[j] else np.int32(0x7E00)
                out[j] = np.uint16(half | np.int32((bits[j] >> 16) & 0x8000))

        return to_float16

    def to_float(values, out):
        for j in range(values.size):
            out[j] = values[j]

    return to_float


def _load_keys(x, start, count, block, keys, magnitude):
    raise AssertionError("compiled only")


@overload(_load_keys, jit_options={"error_model": "numpy"})
def _load_keys_by_type(x, start, count, block, keys, magnitude):
    """Keys of values start..start+count of x, or of their magnitudes, into keys."""
    if x.dtype == types.int32:

        def copy(x, start, count, block, keys, magnitude):
            for j in range(count):
                keys[j] = x[start + j]

        return copy

    def from_floats(x, start, count, block, keys, magnitude):
        bits = _load(x, start, count, block).view(np.int32)
        if magnitude:
            for j in range(count):
                keys[j] = min(bits[j] & _MAGNITUDE, _GREATEST)
        else:
            for j in range(count):
                keys[j] = min(bits[j] ^ ((bits[j] >> 31) & _MAGNITUDE), _GREATEST)

    return from_floats


@jit
def extent(x, first, last):
    """The least and the greatest key of blocks first..last."""
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        _load_keys(x, b * BLOCK, count, block, keys, False)
        for j in range(count):
            low = min(low, keys[j])
            high = max(high, keys[j])
    return low, high


@jit
def sample(x, first, last, stride, magnitude, out):
    """One key from a random place in each of the strides first..last; the place depends on the stride alone."""
    picked = np.empty(BLOCK, x.dtype)
    block = np.empty(BLOCK, np.float32)
    for start in range(first, last, BLOCK):
        count = min(BLOCK, last - start)
        for j in range(count):
            mixed = np.uint32(start + j)  # murmur3's finalizer: a hash, so that shares need no common state
            mixed = np.uint32((mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B))
            mixed = np.uint32((mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35))
            place = np.int64((np.uint64(mixed ^ (mixed >> np.uint32(16))) * np.uint64(stride)) >> np.uint64(32))
            picked[j] = x[(start + j) * stride + place]
        _load_keys(picked, 0, count, block, out[start : start + count], magnitude)


@jit
def _append(keys, chosen, gathered, found):
    """Put the chosen keys of a block behind the ``found`` ones; how many there are then, or -1: no room.

    Word by word of 8, those with nothing chosen left out, and without a branch that would be mispredicted: so a key is
    written before it is known whether it counts, and the last place of ``gathered`` is never filled.
    """
    words = chosen.view(np.uint64)
    filled = np.empty(words.size, np.int32)
    some = 0
    for w in range(words.size):
        filled[some] = w
        some += words[w] != 0
    if found + 8 * some >= gathered.size:
        total = 0
        for j in range(chosen.size):
            total += chosen[j]
        if found < 0 or found + total >= gathered.size:
            return -1
    for w in range(some):
        for j in range(8 * filled[w], 8 * filled[w] + 8):
            gathered[found] = keys[j]
            found += chosen[j]
    return found


@jit
def count_and_gather(x, first, last, magnitude, bounds, regions, below, gathered):
    """One read of blocks first..last: how many keys are below each bound, and the keys that lie in the regions.

    regions[i] = (a, b) stands for a <= key < b. Returns the least and greatest key and how many were gathered, or -1
    where they do not fit. Example: keys 5 1 7 3, bounds [4], region [3, 6): below [2], gathered 5 3.
    """
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    inside = np.empty(BLOCK, np.uint8)
    found = 0
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        _load_keys(x, b * BLOCK, count, block, keys, magnitude)
        for j in range(count):
            low = min(low, keys[j])
            high = max(high, keys[j])
        for i in range(bounds.size):
            bound = bounds[i]
            less = np.int32(0)
            for j in range(count):
                less = np.int32(less + (keys[j] < bound))
            below[i] += less
        if regions.shape[0] == 0 or found < 0:
            continue
        inside[:] = 0
        for i in range(regions.shape[0]):
            start, stop = regions[i, 0], regions[i, 1]
            for j in range(count):
                inside[j] |= np.uint8((keys[j] >= start) & (keys[j] < stop))
        found = _append(keys, inside, gathered, found)
    return low, high, found


@jit
def histogram(x, first, last, left, right, p, offset, scale, counts, gathered):
    """One read of blocks first..last: how many values fall into equal bins between two keys, and the keys outside.

    The bin is (x*p - offset)*scale; the last one counts the keys outside. counts has two rows, for even and odd
    places: equal values in a row, as a ReLU makes them, would otherwise each wait for the last one's sum. Returns as
    count_and_gather does.
    """
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    bins = np.empty(BLOCK, np.int32)
    outside = np.empty(BLOCK, np.uint8)
    even, odd = counts[0], counts[1]
    top = np.float32(even.size - 2)
    found = 0
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        _load_keys(x, b * BLOCK, count, block, keys, False)
        values = _load(x, b * BLOCK, count, block)
        for j in range(count):
            low = min(low, keys[j])
            high = max(high, keys[j])
        for j in range(count):
            place = (values[j] * p - offset) * scale
            place = place if place > np.float32(0) else np.float32(0)  # NaN too
            bins[j] = np.int32(place if place < top else top)
        outside[count:] = 0
        for j in range(count):
            outside[j] = np.uint8((keys[j] < left) | (keys[j] > right))
        for j in range(count):
            bins[j] = even.size - 1 if outside[j] else bins[j]
        for j in range(count // 2):
            even[bins[2 * j]] += np.uint32(1)
            odd[bins[2 * j + 1]] += np.uint32(1)
        if count % 2:
            even[bins[count - 1]] += np.uint32(1)
        found = _append(keys, outside, gathered, found)
    return low, high, found


@jit
def _pack(codes, wire, piece, bits):
    """One block of 8 pieces of codes into planes; consumes the codes. See thinpipe.codecs.layout."""
    start, left = 0, bits
    while left > 0:
        width = 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        rows = width * piece
        row = wire[start : start + rows]
        if width == 8:
            for j in range(rows):
                row[j] = np.uint8(codes[j])
            if left > 8:
                for j in range(PIECES * piece):
                    codes[j] >>= 8
        elif width == 4:
            c0, c1 = codes[:rows], codes[rows : 2 * rows]
            for j in range(rows):
                row[j] = np.uint8((c0[j] & 15) | ((c1[j] & 15) << 4))
            if left > 4:
                for j in range(PIECES * piece):
                    codes[j] >>= 4
        elif width == 2:
            c0, c1, c2, c3 = (
                codes[:rows],
                codes[rows : 2 * rows],
                codes[2 * rows : 3 * rows],
                codes[3 * rows : 4 * rows],
            )
            for j in range(rows):
                row[j] = np.uint8((c0[j] & 3) | ((c1[j] & 3) << 2) | ((c2[j] & 3) << 4) | ((c3[j] & 3) << 6))
            if left > 2:
                for j in range(PIECES * piece):
                    codes[j] >>= 2
        else:
            row[:] = 0
            for i in range(PIECES):
                part = codes[i * rows : (i + 1) * rows]
                bit = np.uint8(1 << i)
                for j in range(rows):
                    row[j] |= bit if part[j] & 1 else np.uint8(0)
        start += rows
        left -= width


@jit
def _unpack(wire, codes, piece, bits):
    """The inverse of _pack."""
    start, shift = 0, 0
    while shift < bits:
        left = bits - shift
        width = 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        rows = width * piece
        row = wire[start : start + rows]
        weight = np.uint16(1 << shift)
        mask = np.uint16((1 << width) - 1)
        for i in range(PIECES // width):
            part = codes[i * rows : (i + 1) * rows]
            down = np.uint16(i * width)
            if shift == 0:
                for j in range(rows):
                    part[j] = np.uint16(np.uint16(np.uint16(row[j]) >> down) & mask)
            else:
                for j in range(rows):
                    bits_here = np.uint16(np.uint16(np.uint16(row[j]) >> down) & mask)
                    part[j] = np.uint16(part[j] + np.uint16(bits_here * weight))
        start += rows
        shift += width


@jit
def look_up(wire, table, out, first, last, bits):
    """Blocks first..last of out: each code's entry of a table of 2^bits."""
    codes = np.empty(BLOCK, np.uint16)
    for b in range(first, last):
        start = b * BLOCK
        count = min(BLOCK, out.size - start)
        piece = (count + PIECES - 1) // PIECES
        packed = wire[b * PIECE * bits : b * PIECE * bits + piece * bits]
        values = out[start : start + count]
        if bits == 8:
            for j in range(count):
                values[j] = table[packed[j]]
        else:
            _unpack(packed, codes, piece, bits)
            for j in range(count):
                values[j] = table[codes[j]]


@jit
def _search(values, thresholds, codes):
    """codes[j] = how many of the 2^k - 1 rising thresholds lie below values[j].

    Counting against up to 15 of them runs at full SIMD width; halving the rest does not, but takes few steps.
    """
    step = max(1, (thresholds.size + 1) // 16)
    codes[:] = 0
    for i in range(step - 1, thresholds.size, step):
        threshold = thresholds[i]
        for j in range(values.size):
            codes[j] = np.uint16(codes[j] + np.uint16(values[j] > threshold))
    if step == 1:
        return
    for j in range(values.size):
        codes[j] = np.uint16(codes[j] * step)
    # The sign of a difference instead of a comparison: a branch here would be mispredicted every other time.
    above = np.empty(values.size, np.float32)
    signs = above.view(np.int32)
    while step > 1:
        step //= 2
        middle = thresholds[step - 1 :]
        for j in range(values.size):
            above[j] = middle[codes[j]] - values[j]
        for j in range(values.size):
            codes[j] = np.uint16(codes[j] + (step & (signs[j] >> 31)))


@jit
def encode_codebook(x, wire, first, last, thresholds, bits):
    """Blocks first..last as indices between thresholds, packed."""
    block = np.empty(BLOCK, np.float32)
    codes = np.empty(BLOCK, np.uint16)
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        piece = (count + PIECES - 1) // PIECES
        codes[count : PIECES * piece] = 0
        _search(_load(x, b * BLOCK, count, block), thresholds, codes[:count])
        _pack(codes, wire[b * PIECE * bits : b * PIECE * bits + piece * bits], piece, bits)


@jit
def encode_buckets(x, wire, first, last, cuts, p, offset, scale, level_bits, split_bits):
    """Blocks first..last as bucket * 2^level_bits + round((x*p - offset)*scale), packed.

    A value is in bucket i if it lies above the first i cuts. Few buckets: each in turn overwrites the codes of the
    values above its cut, loops that run at full SIMD width. Many: a search, then a look-up of the bucket's numbers.
    """
    block = np.empty(BLOCK, np.float32)
    codes = np.empty(BLOCK, np.uint16)
    bits = level_bits + split_bits
    top = np.float32((1 << level_bits) - 1)
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        piece = (count + PIECES - 1) // PIECES
        codes[count : PIECES * piece] = 0
        values = _load(x, b * BLOCK, count, block)
        if split_bits <= 4:
            factor, origin, steps = p[0], offset[0], scale[0]
            for j in range(count):
                level = np.rint((values[j] * factor - origin) * steps)
                codes[j] = np.uint16(np.int32(level if level < top else top))
            for i in range(cuts.size):
                cut, factor, origin, steps = cuts[i], p[i + 1], offset[i + 1], scale[i + 1]
                base = np.float32((i + 1) << level_bits)
                for j in range(count):
                    level = np.rint((values[j] * factor - origin) * steps)
                    code = np.uint16(np.int32((level if level < top else top) + base))
                    codes[j] = code if values[j] > cut else codes[j]
        else:
            _search(values, cuts, codes[:count])
            for j in range(count):
                i = codes[j]
                level = np.rint((values[j] * p[i] - offset[i]) * scale[i])
                codes[j] = np.uint16((i << level_bits) + np.int32(level if level < top else top))
        _pack(codes, wire[b * PIECE * bits : b * PIECE * bits + piece * bits], piece, bits)


@jit
def count_from(x, first, last, threshold):
    """How many magnitudes of blocks first..last are above the threshold's key, and how many are equal to it."""
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    above, equal = 0, 0
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        _load_keys(x, b * BLOCK, count, block, keys, True)
        more, same = np.int32(0), np.int32(0)
        for j in range(count):
            more = np.int32(more + (keys[j] > threshold))
            same = np.int32(same + (keys[j] == threshold))
        above += more
        equal += same
    return above, equal


@jit
def keep_largest(x, first, last, threshold, ties, place, values, positions, mask):
    """Write the values of blocks first..last above the threshold, and the first ``ties`` that are equal to it.

    From ``place`` on into values, each with its index into positions, or with its bit set in mask: one is empty.
    """
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    kept = np.empty(BLOCK, np.uint8)
    indices = np.empty(BLOCK + 1, np.int32)
    for b in range(first, last):
        start = b * BLOCK
        count = min(BLOCK, x.size - start)
        _load_keys(x, start, count, block, keys, True)
        kept[:] = 0
        for j in range(count):
            kept[j] = np.uint8(keys[j] > threshold)
        j = 0
        while ties > 0 and j < count:
            if keys[j] == threshold:
                kept[j] = 1
                ties -= 1
            j += 1
        found = 0
        for j in range(count):
            indices[found] = j
            found += kept[j]
        floats = _load(x, start, count, block)
        for j in range(found):
            values[place + j] = floats[indices[j]]
        if positions.size:
            for j in range(found):
                positions[place + j] = start + indices[j]
        place += found
        if mask.size:
            for j in range((count + 7) // 8):
                byte = 0
                for i in range(8):
                    byte |= kept[8 * j + i] << i
                mask[start // 8 + j] = byte


@jit
def count_bits(mask, first, last):
    total = 0
    for j in range(first, last):
        byte = mask[j]
        for i in range(8):
            total += (byte >> i) & 1
    return total


@jit
def place_by_mask(mask, first, last, values, place, out):
    """Bytes first..last of a mask: the next value where a bit is set, zero elsewhere and once values run out."""
    indices = np.empty(BLOCK + 1, np.int32)
    for start in range(first, last, BLOCK // 8):
        stop = min(start + BLOCK // 8, last)
        found = 0
        for j in range(start, stop):
            byte = mask[j]
            for i in range(8):
                indices[found] = 8 * (j - start) + i
                found += (byte >> i) & 1
        block = out[8 * start : min(8 * stop, out.size)]
        block[:] = 0
        for i in range(min(found, values.size - place)):
            if indices[i] < block.size:
                block[indices[i]] = values[place + i]
        place = min(place + found, values.size)


@jit
def place_by_index(positions, values, out):
    """Values at their positions; positions outside of out are passed over."""
    for i in range(values.size):
        if 0 <= positions[i] < out.size:
            out[positions[i]] = values[i]


@jit
def _rotate(values, scale):
    """The Hadamard transform of a tile in place: distances 1, 2 and 4 on eight values at once, then the larger ones."""
    for j in range(0, values.size, 8):
        a, b, c, d = values[j], values[j + 1], values[j + 2], values[j + 3]
        e, f, g, h = values[j + 4], values[j + 5], values[j + 6], values[j + 7]
        a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
        a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
        values[j], values[j + 1], values[j + 2], values[j + 3] = a + e, b + f, c + g, d + h
        values[j + 4], values[j + 5], values[j + 6], values[j + 7] = a - e, b - f, c - g, d - h
    distance = 8
    while distance < values.size:
        for start in range(0, values.size, 2 * distance):
            left, right = values[start : start + distance], values[start + distance : start + 2 * distance]
            for j in range(distance):
                a, b = left[j], right[j]
                left[j] = a + b
                right[j] = a - b
        distance *= 2
    for j in range(values.size):
        values[j] *= scale


@jit
def _bfloat16_up(x):
    """The bits of the smallest bfloat16 that is not below x >= 0."""
    return np.int32(np.int32(_bits(x) + 0xFFFF) & ~0xFFFF)


@jit
def _bfloat16_down(x):
    """The bits of the largest finite bfloat16 that is not above x; those of the lowest if all are."""
    bits = _bits(x)
    down = np.int32(bits & ~0xFFFF)
    if bits < 0 and bits != down:
        down = np.int32(down + 0x10000)
    return down if _float(down) >= -_BFLOAT16_MAX else _bits(-_BFLOAT16_MAX)


@jit
def _tile_affine(lo, hi, top, zero):
    """(unit, step, origin) of a tile between lo and hi; step and origin, which is low or point, in units of 1/unit.

    See thinpipe.codecs.tile, of which this is the arithmetic word by word.
    """
    nothing = np.float32(0)
    unit = _TILE_UNIT if max(abs(lo), abs(hi)) >= _TILE_HUGE else np.float32(1)
    if zero:
        lo, hi = min(lo, nothing) * unit, max(hi, nothing) * unit
        if lo == hi:
            return unit, nothing, nothing
        point = np.rint(-lo / (hi - lo) * top)
        if lo < 0:
            point = max(point, np.float32(1))
        if hi > 0:
            point = min(point, top - np.float32(1))
        above = top - point
        least = -lo / point if point > 0 else nothing
        least = max(least, hi / above if above > 0 else nothing)
        bits = max(_bfloat16_up(least), _TILE_LEAST_STEP)
        step = _float(bits)
        if point * step < -lo or above * step < hi:
            step = _float(bits + 0x10000)
        return unit, min(step, _BFLOAT16_MAX * unit), point
    low = _float(_bfloat16_down(lo)) * unit
    hi = hi * unit
    if hi <= low:
        return unit, nothing, low
    bits = max(_bfloat16_up((hi - low) / top), _TILE_LEAST_STEP)
    step = _float(bits)
    if low + top * step < hi:
        step = _float(bits + 0x10000)
    return unit, min(step, _BFLOAT16_MAX * unit), low


@jit
def _mix(z):
    z = np.uint32(np.uint32(z ^ np.uint32(z >> np.uint32(16))) * np.uint32(0x7FEB352D))
    z = np.uint32(np.uint32(z ^ np.uint32(z >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(z ^ np.uint32(z >> np.uint32(16)))


@jit
def encode_tiles(x, words, wire, first, last, bits, tile, rot, sr, zero, key):
    """Units first..last of x: a tile or a block, whichever is larger, so that each is whole tiles and whole blocks.

    words has a row of steps and a row of lows or points.
    """
    unit_size = max(tile, BLOCK)
    block = np.empty(unit_size, np.float32)
    codes = np.empty(unit_size, np.uint8)
    top = np.float32((1 << bits) - 1)
    nothing, half = np.float32(0), np.float32(0.5)
    key_low, key_high = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    scale = np.float32(tile**-0.5)
    total = words.shape[1] * tile if rot else x.size
    for u in range(first, last):
        start = u * unit_size
        count, given = min(unit_size, total - start), min(unit_size, x.size - start)
        values = _load(x, start, given, block)
        if rot:
            block[:given] = values
            block[given:count] = 0
            values = block[:count]
            for s in range(0, count, tile):
                _rotate(values[s : s + tile], scale)
        for s in range(0, count, tile):
            part = values[s : min(s + tile, count)]
            chosen = codes[s : s + part.size]
            image = part.view(np.int32)
            low_key, high_key = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
            for j in range(part.size):
                key_j = np.int32(image[j] ^ ((image[j] >> 31) & _MAGNITUDE))
                low_key = min(low_key, key_j)
                high_key = max(high_key, key_j)
            t = (start + s) // tile
            if low_key <= ~_INFINITY or high_key >= _INFINITY:
                words[0, t], words[1, t] = _NAN_WORD, np.uint16(0) if zero else _NAN_WORD
                chosen[:] = 0
                continue
            lo = _float(low_key ^ ((low_key >> 31) & _MAGNITUDE)) + nothing  # -0 is 0
            hi = _float(high_key ^ ((high_key >> 31) & _MAGNITUDE)) + nothing
            unit, step, origin = _tile_affine(lo, hi, top, zero)
            words[0, t] = np.uint16(_bits(step / unit) >> 16)
            words[1, t] = np.uint16(origin) if zero else np.uint16(_bits(origin / unit) >> 16)
            inverse = np.float32(1) / step if step > 0 else nothing
            # (x - 0) * inverse + point with +zero, (x - low) * inverse + 0 without: one of the two changes nothing.
            below, point = (nothing, origin) if zero else (origin, nothing)
            if sr:
                base = np.uint32((start + s) & 0xFFFFFFFF)
                added = np.uint32(key_high + np.uint32(((start + s) >> 32) * 0x9E3779B9))
                for j in range(part.size):
                    place = (part[j] * unit - below) * inverse + point
                    place = place if place > nothing else nothing
                    place = place if place < top else top
                    whole = np.int32(place)
                    word = _mix(np.uint32(_mix(np.uint32(np.uint32(base + np.uint32(j)) ^ key_low)) + added))
                    draw = np.float32(np.int32(word >> np.uint32(8))) * _DRAW
                    chosen[j] = np.uint8(np.int32(whole + np.int32(draw < place - np.float32(whole))))
            else:
                for j in range(part.size):
                    place = (part[j] * unit - below) * inverse + point
                    place = (place if place > nothing else nothing) + half
                    chosen[j] = np.uint8(np.int32(place if place < top else top))
        for s in range(0, count, BLOCK):
            here = min(BLOCK, count - s)
            piece = (here + PIECES - 1) // PIECES
            codes[s + here : s + PIECES * piece] = 0
            begin = (start + s) // PIECES * bits
            _pack(codes[s : s + PIECES * piece], wire[begin : begin + piece * bits], piece, bits)


@jit
def decode_tiles(wire, words, out, first, last, bits, tile, rot, zero):
    """Units first..last, as encode_tiles has them, of out."""
    unit_size = max(tile, BLOCK)
    block = np.empty(unit_size, np.float32)
    codes = np.empty(unit_size, np.uint8)
    scale = np.float32(tile**-0.5)
    total = words.shape[1] * tile if rot else out.size
    nothing = np.float32(0)
    for u in range(first, last):
        start = u * unit_size
        count, wanted = min(unit_size, total - start), min(unit_size, out.size - start)
        for s in range(0, count, BLOCK):
            piece = (min(BLOCK, count - s) + PIECES - 1) // PIECES
            begin = (start + s) // PIECES * bits
            _unpack(wire[begin : begin + piece * bits], codes[s : s + PIECES * piece], piece, bits)
        values = block[:count]
        for s in range(0, count, tile):
            t = (start + s) // tile
            part, chosen = values[s : s + tile], codes[s : s + tile]
            step = _float(np.int32(words[0, t]) << 16)
            low = nothing if zero else _float(np.int32(words[1, t]) << 16)
            point = np.float32(np.int16(words[1, t])) if zero else nothing
            huge = step >= _TILE_HUGE or abs(low) >= _TILE_HUGE
            unit = _TILE_UNIT if huge else np.float32(1)
            low, step = low * unit, step * unit
            for j in range(part.size):
                part[j] = low + (np.float32(np.int32(chosen[j])) - point) * step
            if huge:
                for j in range(part.size):
                    value = part[j] / unit
                    value = _FLOAT32_MAX if value > _FLOAT32_MAX else value
                    part[j] = -_FLOAT32_MAX if value < -_FLOAT32_MAX else value
            if rot:
                _rotate(part, scale)
        _store(values[:wanted], out[start : start + wanted])
