"""Quantization of values to packed codes: the index between thresholds, or the bucket and the level in it."""

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.kernels.cpu.loops.pack import pack
from thinpipe.codecs.kernels.cpu.loops.values import load_values
from thinpipe.codecs.layout import BLOCK, PIECE, PIECES


@jit
def _at(thresholds, i):
    return thresholds[i] if i < thresholds.size else np.float32(np.inf)


@jit
def _count(values, thresholds, codes):
    """Add to each code the number of thresholds, at most 8, below its value, in one pass."""
    a, b, c, d = _at(thresholds, 0), _at(thresholds, 1), _at(thresholds, 2), _at(thresholds, 3)
    e, f, g, h = _at(thresholds, 4), _at(thresholds, 5), _at(thresholds, 6), _at(thresholds, 7)
    if thresholds.size <= 4:
        for j in range(values.size):
            above = np.int32(np.int32(values[j] > a) + np.int32(values[j] > b))
            above = np.int32(above + np.int32(np.int32(values[j] > c) + np.int32(values[j] > d)))
            codes[j] = np.uint16(codes[j] + np.uint16(above))
        return
    for j in range(values.size):
        value = values[j]
        above = np.int32(np.int32(value > a) + np.int32(value > b))
        above = np.int32(above + np.int32(np.int32(value > c) + np.int32(value > d)))
        above = np.int32(above + np.int32(np.int32(value > e) + np.int32(value > f)))
        above = np.int32(above + np.int32(np.int32(value > g) + np.int32(value > h)))
        codes[j] = np.uint16(codes[j] + np.uint16(above))


@jit
def search(values, thresholds, codes):
    """Set codes[j] to the number of the 2^k - 1 ascending thresholds below values[j].

    Comparing with up to 15 of them runs at full SIMD width; binary search in the rest does not, but takes few steps.
    """
    step = max(1, (thresholds.size + 1) // 16)
    codes[:] = 0
    counted = thresholds[step - 1 :: step]
    for i in range(0, counted.size, 8):
        _count(values, counted[i : i + 8], codes)
    if step == 1:
        return
    for j in range(values.size):
        codes[j] = np.uint16(codes[j] * step)
    # Uses the sign of a difference, not a comparison: a branch here would be mispredicted every other time.
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
    """Encode blocks first..last as packed indices between thresholds."""
    block = np.empty(BLOCK, np.float32)
    codes = np.empty(BLOCK, np.uint16)
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        piece = (count + PIECES - 1) // PIECES
        codes[count : PIECES * piece] = 0
        search(load_values(x, b * BLOCK, count, block), thresholds, codes[:count])
        pack(codes, wire[b * PIECE * bits : b * PIECE * bits + piece * bits], piece, bits)


@jit
def encode_buckets(x, wire, first, last, cuts, p, offset, scale, level_bits, split_bits):
    """Encode blocks first..last as bucket * 2^level_bits + round((x*p - offset)*scale), packed.

    A value is in bucket i if it is above the first i cuts. With few buckets, each in turn overwrites the codes of the
    values above its cut, at full SIMD width. With many, a search is followed by a look-up of the bucket's parameters.
    """
    block = np.empty(BLOCK, np.float32)
    codes = np.empty(BLOCK, np.uint16)
    bits = level_bits + split_bits
    top = np.float32((1 << level_bits) - 1)
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        piece = (count + PIECES - 1) // PIECES
        codes[count : PIECES * piece] = 0
        values = load_values(x, b * BLOCK, count, block)
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
            search(values, cuts, codes[:count])
            for j in range(count):
                i = codes[j]
                level = np.rint((values[j] * p[i] - offset[i]) * scale[i])
                codes[j] = np.uint16((i << level_bits) + np.int32(level if level < top else top))
        pack(codes, wire[b * PIECE * bits : b * PIECE * bits + piece * bits], piece, bits)
