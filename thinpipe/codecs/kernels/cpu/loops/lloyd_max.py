"""Rotated Lloyd-Max quantization of blocks to packed codes and back (thinpipe.codecs.gauss).

Means have one of two forms. With an inner size of 1 there is one mean per position, repeated for one unit beyond the
last channel, so that a unit may begin at any channel. Otherwise each mean belongs to ``inner`` neighbouring values.
"""

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.kernels.cpu.loops.codes import search
from thinpipe.codecs.kernels.cpu.loops.hadamard import butterflies
from thinpipe.codecs.kernels.cpu.loops.pack import pack, unpack
from thinpipe.codecs.kernels.cpu.loops.values import INFINITY, MAGNITUDE, bits_of, float_of, load_values, store_values
from thinpipe.codecs.layout import (
    BLOCK,
    GAUSS_BLOCK,
    GAUSS_BY_LARGEST,
    GAUSS_HUGE,
    GAUSS_LEAST,
    GAUSS_MIX,
    GAUSS_PLACE,
    GAUSS_STRANDS,
    PIECES,
)

UNIT = 4096  # values that are transformed at a time: the largest tile, which fits in the L1 cache
NAN_BITS = np.uint16(0x7FC0)  # bfloat16's
ONE = np.int32(0x3F800000)
HUGE = np.float32(GAUSS_HUGE).view(np.int32)
LEAST = np.float32(GAUSS_LEAST).view(np.int32)
_BLOCK, _PLACE, _MIX = np.uint32(GAUSS_BLOCK), np.uint32(GAUSS_PLACE), np.uint32(GAUSS_MIX)
_SIGN = np.uint32(0x80000000)
_WIDTH = 64  # channels whose samples are summed in parallel (SIMD)


@jit
def nearest_bfloat16(x):
    return np.int32(np.int32(bits_of(x) + 0x8000) & ~0xFFFF)


@jit
def channel_means(x, means, places, first, last, inner):
    """Write the means of channels first..last; ``places`` are the positions of the samples of channel 0."""
    strands = np.empty((GAUSS_STRANDS, _WIDTH), np.float32)
    block = np.empty(_WIDTH, np.float32)
    channel = first
    while channel < last:
        width = min(_WIDTH, last - channel) if inner == 1 else 1
        strands[:, :width] = 0
        for k in range(places.size):
            values, sums = load_values(x, places[k] + channel * inner, width, block), strands[k % GAUSS_STRANDS]
            for j in range(width):
                sums[j] += values[j]
        half = GAUSS_STRANDS // 2
        while half > 0:
            for s in range(half):
                for j in range(width):
                    strands[s, j] += strands[s + half, j]
            half //= 2
        for j in range(width):
            bits = nearest_bfloat16(strands[0, j] / np.float32(places.size))
            means[channel + j] = float_of(bits if (bits & MAGNITUDE) < INFINITY else 0)
        channel += width


@jit
def change_signs(values, start, tile, seed):
    """Multiply by the signs of ``layout.gauss_signs`` in place; blocks begin at position ``start`` of the tensor."""
    image = values.view(np.int32)
    for s in range(0, values.size, tile):
        part = image[s : s + tile]
        block = np.uint32(np.uint32((start + s) // tile + seed) * _BLOCK)
        for j in range(tile):
            mixed = np.uint32(block + np.uint32(np.uint32(j) * _PLACE))
            mixed = np.uint32(np.uint32(mixed ^ (mixed >> np.uint32(15))) * _MIX)
            part[j] ^= np.int32(mixed & _SIGN)


@jit
def add_means(values, means, start, inner, out):
    """Write the sum of values from position ``start`` of the tensor on and their means to another array."""
    if inner == 1:
        mean = means[start % (means.size - UNIT) :]
        for j in range(values.size):
            out[j] = values[j] + mean[j]
        return
    j = 0
    while j < values.size:
        place = start + j
        run = min(inner - place % inner, values.size - j)
        one = means[place // inner % means.size]
        part, target = values[j : j + run], out[j : j + run]
        for i in range(run):
            target[i] = part[i] + one
        j += run


@jit
def rotate(x, negated, start, tile, inner, seed, block, other):
    """Centre and transform the unit of x at position ``start``; return the array with the result, and the other.

    negated: the means times -1.
    """
    given = min(UNIT, x.size - start)
    add_means(load_values(x, start, given, other), negated, start, inner, block)
    block[given:] = 0
    change_signs(block, start, tile, seed)
    return butterflies(block, other, tile)


@jit
def restore(rotated, spare, means, start, tile, inner, seed, out):
    """Undo signs and centring of a transformed unit, and store it to ``out``."""
    change_signs(rotated, start, tile, seed)
    values = spare[: min(UNIT, out.size - start)]
    add_means(rotated[: values.size], means, start, inner, values)
    store_values(values, out[start : start + values.size])


@jit
def largest_of(part):
    """Return the bits of the largest magnitude as an int32; NaN is larger than any."""
    image = part.view(np.int32)
    largest = np.int32(0)
    for j in range(image.size):
        largest = max(largest, np.int32(image[j] & MAGNITUDE))
    return largest


@jit
def squares_of(part, power):
    """Return the sum of squares over power^2, each rounded down, in units of 2^-16."""
    factor = float_of(2 * ONE - power) * np.float32(2.0**8)
    total = np.int32(0)
    for j in range(part.size):
        component = part[j] * factor
        total += np.int32(component * component)
    return total


@jit
def scale_of(part, bits, reach):
    """Return (the bfloat16 bits of a block's scale, the factor of its components)."""
    largest = largest_of(part)
    if largest >= HUGE:
        return NAN_BITS, np.float32(0)
    if largest < LEAST:
        return np.uint16(0), np.float32(0)
    power = np.int32(largest & INFINITY)
    inverse = float_of(2 * ONE - power)
    if bits >= GAUSS_BY_LARGEST:
        s = float_of(largest) * inverse * reach
    else:
        s = np.sqrt(np.float32(squares_of(part, power)) * np.float32(2.0**-16 / part.size))
    s = float_of(nearest_bfloat16(s))
    scale = s * np.float32(1 / part.size) * float_of(power)
    return np.uint16(bits_of(scale) >> 16), inverse * (np.float32(1) / s)


@jit
def unbiased_scale(scale, part, codes, levels):
    """Return the bfloat16 bits of the scale with which <decoded block, block> = <block, block>, up to rounding."""
    if scale == 0 or scale == NAN_BITS:
        return scale
    power = np.int32(largest_of(part) & INFINITY)
    factor = float_of(2 * ONE - power) * np.float32(2.0**8)
    products = np.uint32(0)
    for j in range(part.size):
        products += np.uint32(abs(part[j] * factor) * (levels[codes[j]] * np.float32(2.0**8)))
    s = float_of(nearest_bfloat16(np.float32(squares_of(part, power)) / np.float32(products)))
    return np.uint16(bits_of(s * np.float32(1 / part.size) * float_of(power)) >> 16)


@jit
def encode_blocks(x, negated, scales, wire, first, last, tile, inner, thresholds, levels, reach, seed):
    """Encode units first..last of x: transform, quantize and pack. A unit is a number of complete blocks.

    levels: the positive levels if scales are to be unbiased, else empty.
    """
    bits = 1
    while 1 << (bits - 1) <= thresholds.size:
        bits += 1
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    codes = np.empty(UNIT, np.uint16)
    total = scales.size * tile
    sign = np.uint16(1 << (bits - 1))
    for u in range(first, last):
        start = u * UNIT
        count = min(UNIT, total - start)
        rotated, sizes = rotate(x, negated, start, tile, inner, seed, block, other)
        for s in range(0, count, tile):
            part, magnitudes = rotated[s : s + tile], sizes[s : s + tile]
            scale, factor = scale_of(part, bits, reach)
            scales[(start + s) // tile] = scale
            if factor == 0:
                part[:] = 0
            for j in range(tile):
                magnitudes[j] = abs(part[j] * factor)
        search(sizes[:count], thresholds, codes[:count])
        if levels.size:
            for s in range(0, count, tile):
                b = (start + s) // tile
                scales[b] = unbiased_scale(scales[b], rotated[s : s + tile], codes[s : s + tile], levels)
        for j in range(count):
            codes[j] = np.uint16(codes[j] + (sign if rotated[j] < 0 else np.uint16(0)))
        for s in range(0, count, BLOCK):
            here = min(BLOCK, count - s)
            begin = (start + s) // PIECES * bits
            pack(codes[s : s + here], wire[begin : begin + here // PIECES * bits], here // PIECES, bits)


@jit
def look_up_levels(codes, levels, scale, out):
    """Write the level of each code times a scale; up to 8 magnitudes by selects, which are faster than a look-up."""
    if levels.size > 16:
        for j in range(codes.size):
            out[j] = levels[codes[j]] * scale
        return
    half = np.uint8(levels.size // 2)
    last = levels.size - 1  # with fewer than 8 levels some of these are never chosen
    a, b, c, d = levels[0] * scale, levels[1] * scale, levels[min(2, last)] * scale, levels[min(3, last)] * scale
    e, f, g = levels[min(4, last)] * scale, levels[min(5, last)] * scale, levels[min(6, last)] * scale
    h = levels[min(7, last)] * scale
    for j in range(codes.size):
        magnitude = np.uint8(codes[j] & np.uint8(half - np.uint8(1)))
        value = a
        value = b if magnitude > 0 else value
        value = c if magnitude > 1 else value
        value = d if magnitude > 2 else value
        value = e if magnitude > 3 else value
        value = f if magnitude > 4 else value
        value = g if magnitude > 5 else value
        value = h if magnitude > 6 else value
        out[j] = -value if codes[j] >= half else value


@jit
def decode_blocks(wire, scales, means, out, first, last, bits, tile, inner, levels, seed):
    """Decode units first..last of out, as written by encode_blocks."""
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    codes = np.empty(UNIT, np.uint8)
    total = scales.size * tile
    for u in range(first, last):
        start = u * UNIT
        count = min(UNIT, total - start)
        for s in range(0, count, BLOCK):
            here = min(BLOCK, count - s)
            begin = (start + s) // PIECES * bits
            unpack(wire[begin : begin + here // PIECES * bits], codes[s : s + here], here // PIECES, bits)
        for s in range(0, count, tile):
            part, chosen = block[s : s + tile], codes[s : s + tile]
            scale = float_of(np.int32(scales[(start + s) // tile]) << 16)
            look_up_levels(chosen, levels, scale, part)
        rotated, spare = butterflies(block, other, tile)
        restore(rotated, spare, means, start, tile, inner, seed, out)
