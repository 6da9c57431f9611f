"""Rotated blocks to bit planes and back, each block with bits of its own, as thinpipe.codecs.adaptive has it."""

from __future__ import annotations

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.kernels.cpu.loops.bitplanes import from_planes, to_planes
from thinpipe.codecs.kernels.cpu.loops.codes import search
from thinpipe.codecs.kernels.cpu.loops.gauss import (
    HUGE,
    INFINITY,
    LEAST,
    UNIT,
    centre,
    change_signs,
    largest_of,
    look_up_levels,
    restore,
    scale_of,
    squares_of,
    unbiased_word,
)
from thinpipe.codecs.kernels.cpu.loops.hadamard import butterflies
from thinpipe.codecs.kernels.cpu.loops.values import bits_of, float_of, load_values, store_values


@jit
def rotate_blocks(x, means, rotated, energies, first, last, tile, inner, seed):
    """Units first..last of x, and what their blocks have of energy."""
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    for u in range(first, last):
        start = u * UNIT
        count, given = min(UNIT, rotated.size - start), min(UNIT, x.size - start)
        centre(load_values(x, start, given, other), means, start, inner, block)
        change_signs(block, start, tile, seed)
        done, _ = butterflies(block, other, tile)
        rotated[start : start + count] = done[:count]
        for s in range(0, count, tile):
            part = done[s : s + tile]
            largest, energy = largest_of(part), np.int32(0)
            if LEAST <= largest < HUGE:
                power = np.int32(largest & INFINITY)
                energy = np.int32((bits_of(np.float32(squares_of(part, power))) >> 18) + (power >> 23 << 6))
            energies[(start + s) // tile] = energy


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
def encode_adaptive_blocks(rotated, words, bits, starts, planes, first, last, boundaries, levels, unbiased, reach):
    """Blocks first..last."""
    tile = rotated.size // words.size
    magnitudes, codes = np.empty(tile, np.float32), np.empty(tile, np.uint16)
    narrow = np.empty(tile, np.uint8)
    for b in range(first, last):
        part, width = rotated[b * tile : (b + 1) * tile], np.int64(bits[b])
        half = 1 << (width - 1)
        word, factor = scale_of(part, width, reach)
        if factor == 0:
            part[:] = 0
        for j in range(tile):
            magnitudes[j] = abs(part[j] * factor)
        search(magnitudes, boundaries[width, : half - 1], codes)
        if unbiased:
            word = unbiased_word(word, part, codes, levels[width])
        words[b] = word
        for j in range(tile):
            narrow[j] = np.uint8(codes[j] + (half if part[j] < 0 else 0))
        to_planes(narrow, planes[starts[b] : starts[b] + width])


@jit
def decode_adaptive_blocks(planes, words, bits, starts, means, out, first, last, tile, inner, levels, seed):
    """Units first..last of out, as rotate_blocks has them."""
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    codes = np.empty(tile, np.uint8)
    for u in range(first, last):
        start = u * UNIT
        count, wanted = min(UNIT, words.size * tile - start), min(UNIT, out.size - start)
        for s in range(0, count, tile):
            b = (start + s) // tile
            width = np.int64(bits[b])
            from_planes(planes[starts[b] : starts[b] + width], codes)
            look_up_levels(codes, levels[width, : 1 << width], float_of(np.int32(words[b]) << 16), block[s : s + tile])
        rotated, _ = butterflies(block, other, tile)
        change_signs(rotated, start, tile, seed)
        restore(rotated[:wanted], means, start, inner)
        store_values(rotated[:wanted], out[start : start + wanted])
