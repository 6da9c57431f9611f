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
from thinpipe.codecs.layout import BLOCK, PIECE, PIECES

_MAGNITUDE = np.int32(0x7FFFFFFF)
_GREATEST = np.int32(0x7FFFFFFE)  # one NaN is lowered to this, so that a key below 0x7FFFFFFF is every key
_HALF_REBIAS = np.float32(2.0**112)  # float16 bits moved to a float32's place are too small by this


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
def count_and_gather(x, first, last, magnitude, bounds, regions, below, gathered):
    """One read of blocks first..last: how many keys are below each bound, and the keys that lie in the regions.

    regions[i] = (a, b) stands for a <= key < b. Returns the least and greatest key and how many were gathered, or -1
    where they do not fit. ``gathered`` needs room for 8 more than it may hold, since appending writes before it
    decides. Example: keys 5 1 7 3, bounds [4], region [3, 6): below [2], gathered 5 3.
    """
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    inside = np.zeros(BLOCK, np.uint8)
    words = inside.view(np.uint64)
    full_words = np.empty(BLOCK // 8, np.int32)
    room = gathered.size - 8
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
        # Appending each word of 8 keys that holds one, without a branch that the processor would mispredict.
        some = 0
        for w in range(words.size):
            full_words[some] = w
            some += words[w] != 0
        if found + 8 * some > room:
            total = 0
            for j in range(count):
                total += inside[j]
            if found + total > room:
                found = -1
                continue
        for w in range(some):
            start = 8 * full_words[w]
            for j in range(start, start + 8):
                gathered[found] = keys[j]
                found += inside[j]
    return low, high, found


@jit
def histogram(x, first, last, left, right, p, offset, scale, counts, gathered):
    """One read of blocks first..last: how many values fall into equal bins between two keys, and the keys outside.

    The bin is (x*p - offset)*scale. counts has two rows, for even and odd places: equal values in a row, as a ReLU
    makes them, would otherwise each wait for the last one's sum. Returns as count_and_gather does.
    """
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    bins = np.empty(BLOCK, np.int32)
    top = np.float32(counts.shape[1] - 1)
    room = gathered.size - 1
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
        for j in range(count):
            if left <= keys[j] <= right:
                counts[j & 1, bins[j]] += 1
            else:
                gathered[min(found, room)] = keys[j]
                found += 1
    return low, high, found if found <= room else -1


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
            for j in range(PIECES * piece):
                codes[j] >>= 8
        elif width == 4:
            c0, c1 = codes[:rows], codes[rows : 2 * rows]
            for j in range(rows):
                row[j] = np.uint8((c0[j] & 15) | ((c1[j] & 15) << 4))
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
