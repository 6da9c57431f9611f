"""Rotated blocks to bit planes and back, each block with bits of its own, as thinpipe.codecs.adaptive has it."""

from __future__ import annotations

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.kernels.cpu.loops.bitplanes import from_planes, to_planes
from thinpipe.codecs.kernels.cpu.loops.codes import search
from thinpipe.codecs.kernels.cpu.loops.gauss import (
    HUGE,
    LEAST,
    UNIT,
    change_signs,
    largest_of,
    look_up_levels,
    restore,
    rotate,
    scale_of,
    squares_of,
    unbiased_word,
)
from thinpipe.codecs.kernels.cpu.loops.hadamard import butterflies
from thinpipe.codecs.kernels.cpu.loops.values import INFINITY, bits_of, float_of, store_values
from thinpipe.codecs.layout import GAUSS_ENERGY


@jit
def find_energies(x, means, energies, first, last, tile, inner, seed):
    """Of the blocks of units first..last of x."""
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    for start in range(first * UNIT, last * UNIT, UNIT):
        rotated, _ = rotate(x, means, start, tile, inner, seed, block, other)
        for b in range(start // tile, min((start + UNIT) // tile, energies.size)):
            part = rotated[b * tile - start : (b + 1) * tile - start]
            largest, energy = largest_of(part), np.int32(0)
            if LEAST <= largest < HUGE:
                power = np.int32(largest & INFINITY)
                squares = bits_of(np.float32(squares_of(part, power)))
                energy = np.int32((squares >> GAUSS_ENERGY) + (power >> (GAUSS_ENERGY - 1)))
            energies[b] = energy


@jit
def allot(energies, worth, more, bits):
    """The bits of blocks: one each, and so many more for all together. Counts how often each gain is there."""
    lowest = worth.min()
    counts = np.zeros(energies.max() + worth.max() - lowest + 1, np.int64)
    for b in range(energies.size):
        for each in worth:
            counts[energies[b] + each - lowest] += 1
    least = counts.size
    while more > 0:  # all that are above ``least``, and then so many of those that are equal to it
        least -= 1
        if counts[least] >= more:
            break
        more -= counts[least]
    for b in range(energies.size):
        bits[b] = 1
        for each in worth:
            gain = energies[b] + each - lowest
            if gain > least:
                bits[b] += 1
            elif gain == least and more > 0:
                bits[b] += 1
                more -= 1


@jit
def encode_adaptive_blocks(x, means, words, starts, planes, first, last, inner, boundaries, levels, reach, seed):
    """Units first..last of x: rotated again, since to keep them would take as much memory as x.

    starts: the first plane of each block, and one more. levels: where scales are to be unbiased, else none.
    """
    tile = 8 * planes.shape[1]
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    codes, narrow = np.empty(tile, np.uint16), np.empty(tile, np.uint8)
    for start in range(first * UNIT, last * UNIT, UNIT):
        rotated, sizes = rotate(x, means, start, tile, inner, seed, block, other)
        for b in range(start // tile, min((start + UNIT) // tile, words.size)):
            part, magnitudes = rotated[b * tile - start : (b + 1) * tile - start], sizes[:tile]
            width = starts[b + 1] - starts[b]
            half = 1 << (width - 1)
            word, factor = scale_of(part, width, reach)
            if factor == 0:
                part[:] = 0
            for j in range(tile):
                magnitudes[j] = abs(part[j] * factor)
            search(magnitudes, boundaries[width, : half - 1], codes)
            words[b] = unbiased_word(word, part, codes, levels[width]) if levels.size else word
            for j in range(tile):
                narrow[j] = np.uint8(codes[j] + (half if part[j] < 0 else 0))
            to_planes(narrow, planes[starts[b] : starts[b + 1]])


@jit
def decode_adaptive_blocks(planes, words, starts, means, out, first, last, inner, levels, seed):
    """Units first..last of out."""
    tile = 8 * planes.shape[1]
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    codes = np.empty(tile, np.uint8)
    for start in range(first * UNIT, last * UNIT, UNIT):
        for b in range(start // tile, min((start + UNIT) // tile, words.size)):
            width = starts[b + 1] - starts[b]
            from_planes(planes[starts[b] : starts[b + 1]], codes)
            part, scale = block[b * tile - start : (b + 1) * tile - start], float_of(np.int32(words[b]) << 16)
            look_up_levels(codes, levels[width, : 1 << width], scale, part)
        rotated, _ = butterflies(block, other, tile)
        change_signs(rotated, start, tile, seed)
        wanted = min(UNIT, out.size - start)
        restore(rotated[:wanted], means, start, inner)
        store_values(rotated[:wanted], out[start : start + wanted])
