"""Encoding and decoding of rotated blocks in the variant of the Golomb-Rice code of thinpipe.codecs.golomb_rice."""

import numpy as np

from thinpipe.codecs.golomb_rice import CODED_BLOCK, GROWTH, LIMITS, MOST_STEPS, TURNS
from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.kernels.cpu.loops.bits import gather, ones_of, scatter, transpose_bits
from thinpipe.codecs.kernels.cpu.loops.hadamard import butterflies
from thinpipe.codecs.kernels.cpu.loops.lloyd_max import (
    HUGE,
    LEAST,
    NAN_BITS,
    ONE,
    UNIT,
    largest_of,
    nearest_bfloat16,
    restore,
    rotate,
    squares_of,
)
from thinpipe.codecs.kernels.cpu.loops.values import INFINITY, bits_of, float_of
from thinpipe.codecs.layout import GAUSS_ENERGY

_LOW, _HIGH = LIMITS
_ROUNDS = (_HIGH - _LOW).bit_length()
_GROWTH = np.float32(GROWTH)
_PLANE = CODED_BLOCK // 8
_WORDS = CODED_BLOCK // 8  # of 8 values, a byte each
_MASKS = CODED_BLOCK // 64  # words with a bit for each value
_LANES = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_REST = 12  # words of a stream of unary codes: the longest, and one turn of all values beyond its end


@jit
def find_energies(x, negated, found, first, last, inner, seed):
    """Write three rows for blocks of units first..last: energies, bits of the largest magnitude, sums of squares."""
    energies, largests, squares = found[0], found[1], found[2]
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    for start in range(first * UNIT, last * UNIT, UNIT):
        rotated, _ = rotate(x, negated, start, CODED_BLOCK, inner, seed, block, other)
        for b in range(start // CODED_BLOCK, min((start + UNIT) // CODED_BLOCK, energies.size)):
            part = rotated[b * CODED_BLOCK - start : (b + 1) * CODED_BLOCK - start]
            largest, energy = largest_of(part), np.int32(0)
            if LEAST <= largest < HUGE:
                power = np.int32(largest & INFINITY)
                squares[b] = squares_of(part, power)
                bits = bits_of(np.float32(squares[b]))
                energy = np.int32((bits >> GAUSS_ENERGY) + (power >> (GAUSS_ENERGY - 1)))
            energies[b], largests[b] = energy, largest


@jit
def allot(energies, by_energy, budget, sizes):
    """Write the size of every block to ``sizes``: ``budget`` in total at most, by bisection of the limit."""
    low, high = _LOW, _HIGH
    for _ in range(_ROUNDS):
        middle = (low + high) // 2
        total = 0
        for b in range(energies.size):
            total += _size_of(energies, b, middle, by_energy)
        if total <= budget:
            high = middle
        else:
            low = middle
    for b in range(energies.size):
        sizes[b] = _size_of(energies, b, high, by_energy)


@jit
def _size_of(energies, b, limit, by_energy):
    return by_energy[max(0, min(energies[b] + b % TURNS - limit, by_energy.size - 1))]


@jit
def _count_steps(part, factor, low, high, most, magnitudes):
    """Write magnitudes in low steps; return the bits of the unary codes that follow the planes."""
    needed = np.int32(0)
    above = np.int32((1 << high) - 2)
    for j in range(part.size):
        steps = min(np.int32(abs(part[j] * factor)), most)
        magnitudes[j] = steps
        needed += max((steps >> low) - above, np.int32(0))
    return needed


@jit
def _find_magnitudes(part, largest, squares, form, magnitudes):
    """Write the magnitudes of a block with a scale; return half a low step, in units of the power of two p."""
    low, high, rest = np.int32(form[0]), np.int32(form[1]), form[2]
    power = np.int32(largest & INFINITY)
    inverse = float_of(2 * ONE - power)
    width = np.sqrt(np.float32(squares) * np.float32(2.0**-16 / CODED_BLOCK)) * float_of(form[3])
    if rest:
        width = max(width, float_of(largest) * inverse * np.float32(1 / MOST_STEPS))
    most = np.int32(((MOST_STEPS if rest else 1) << low) - 1)
    while True:
        factor = inverse * (np.float32(1) / width) * np.float32(1 << low)
        needed = _count_steps(part, factor, low, high, most, magnitudes)
        if rest == 0 or needed <= 32 * rest:
            return width / np.float32(2 << low)
        width *= _GROWTH


@jit
def _unbiased(part, power, squares, magnitudes):
    """Return the half step with which <decoded block, block> = <block, block>, up to rounding."""
    factor = float_of(2 * ONE - power) * np.float32(2.0**8)
    products = np.int32(0)
    for j in range(part.size):
        products += np.int32(abs(part[j] * factor) * np.float32(2 * magnitudes[j] + 1))
    return np.float32(squares) / np.float32(products) * np.float32(2.0**-8)


@jit
def _gather_tops(words, added, masks):
    """Write the highest bit of every byte, after ``added`` is added to each, to masks in order; return whether any."""
    found = np.uint64(0)
    for m in range(_MASKS):
        mask = np.uint64(0)
        for i in range(8):
            mask |= gather(words[8 * m + i] + added, _TOPS) << np.uint64(8 * i)
        masks[m] = mask
        found |= mask
    return found != np.uint64(0)


@jit
def _write_rest(words, masks, stream):
    """Write the interleaved unary codes of all values, first bits first; ``words`` has the number of bits of each.

    A code of n bits is n - 1 ones and a zero. In every turn the values with a bit are a mask, those with a one are the
    mask of the next turn, and the bits to write are the second gathered by the first.
    """
    stream[:] = 0
    present, following = masks
    place, turn = np.uint64(0), np.uint64(127)
    more = _gather_tops(words, _LANES * turn, present)
    while more:
        turn -= np.uint64(1)
        more = _gather_tops(words, _LANES * turn, following)
        for m in range(_MASKS):
            bits = gather(following[m], present[m])
            word, shift = np.int64(place >> np.uint64(6)), place & np.uint64(63)
            stream[word] |= bits << shift
            stream[word + 1] |= (bits >> np.uint64(1)) >> (np.uint64(63) - shift)
            place += ones_of(present[m])
        present, following = following, present


@jit
def encode_coded_blocks(x, negated, found, scales, starts, payload, first, last, inner, forms, unbiased, seed):
    """Encode units first..last of x; rotates them again, because keeping them would take as much memory as x.

    found: as by find_energies. starts: offsets of blocks in 4-byte units, and the end. payload: bytes of all blocks.
    forms: low, high, rest and the bits of the step by size.
    """
    largests, squares = found[1], found[2]
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    magnitudes, masks = np.empty(CODED_BLOCK, np.int32), np.empty((2, _MASKS), np.uint64)
    codes, turns = np.empty(CODED_BLOCK, np.uint8), np.empty(CODED_BLOCK, np.uint8)
    planes, stream = np.empty(_WORDS, np.uint64), np.empty(_REST, np.uint64)
    for start in range(first * UNIT, last * UNIT, UNIT):
        rotated, _ = rotate(x, negated, start, CODED_BLOCK, inner, seed, block, other)
        for b in range(start // CODED_BLOCK, min((start + UNIT) // CODED_BLOCK, scales.size)):
            part = rotated[b * CODED_BLOCK - start : (b + 1) * CODED_BLOCK - start]
            target = payload[4 * starts[b] : 4 * starts[b + 1]]
            largest, form = largests[b], forms[starts[b + 1] - starts[b]]
            if largest >= HUGE or largest < LEAST:
                scales[b] = NAN_BITS if largest >= HUGE else 0
                target[:] = 0
                continue
            power = np.int32(largest & INFINITY)
            half = _find_magnitudes(part, largest, squares[b], form, magnitudes)
            if unbiased:
                half = _unbiased(part, power, squares[b], magnitudes)
            half = float_of(nearest_bfloat16(half)) * np.float32(1 / CODED_BLOCK)
            scales[b] = np.uint16(bits_of(half * float_of(power)) >> 16)
            low, high = np.int32(form[0]), np.int32(form[1])
            mask, escape, sign = np.int32((1 << low) - 1), np.int32((1 << high) - 1), np.int32(1 << (low + high))
            for j in range(CODED_BLOCK):
                above = magnitudes[j] >> low
                code = (magnitudes[j] & mask) | (min(above, escape) << low)
                codes[j] = np.uint8(code + (sign if part[j] < 0 else np.int32(0)))
                turns[j] = np.uint8(max(above - escape + np.int32(1), np.int32(0)))
            transpose_bits(codes.view(np.uint64), planes)
            end = (low + high + 1) * _PLANE
            target[:end] = planes.view(np.uint8)[:end]
            if form[2]:
                _write_rest(turns.view(np.uint64), masks, stream)
                target[end:] = stream.view(np.uint8)[: target.size - end]


@jit
def _read_rest(words, masks, stream, end):
    """Add the unary codes of _write_rest to words; ``masks[0]``: the values that have one. Bits beyond end are zero."""
    present, place = masks[0], np.uint64(0)
    for _ in range(MOST_STEPS):
        more = np.uint64(0)
        for m in range(_MASKS):
            word, shift = np.int64(place >> np.uint64(6)), place & np.uint64(63)
            given = (stream[word] >> shift) | ((stream[word + 1] << np.uint64(1)) << (np.uint64(63) - shift))
            place += ones_of(present[m])
            present[m] = ones = scatter(given, present[m])
            more |= ones
            for i in range(8):
                words[8 * m + i] += scatter(ones >> np.uint64(8 * i), _LANES)
        if more == np.uint64(0) or place >= end:
            return


@jit
def decode_coded_blocks(payload, scales, starts, means, out, first, last, inner, forms, seed):
    """Decode units first..last of out. On a damaged wire a block may reach beyond its end, where it is zeros."""
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    planes, stream = np.empty(_WORDS, np.uint64), np.empty(_REST, np.uint64)
    codes, more = np.empty(CODED_BLOCK, np.uint8), np.zeros(CODED_BLOCK, np.uint8)
    flags, masks = np.empty(CODED_BLOCK, np.uint8), np.empty((2, _MASKS), np.uint64)
    for start in range(first * UNIT, last * UNIT, UNIT):
        for b in range(start // CODED_BLOCK, min((start + UNIT) // CODED_BLOCK, scales.size)):
            given, form = payload[4 * starts[b] : 4 * starts[b + 1]], forms[starts[b + 1] - starts[b]]
            low, high = np.int32(form[0]), np.int32(form[1])
            end = min((low + high + 1) * _PLANE, given.size)
            plane_bytes, stream_bytes = planes.view(np.uint8), stream.view(np.uint8)
            plane_bytes[:end] = given[:end]
            plane_bytes[end:] = 0
            transpose_bits(planes, codes.view(np.uint64))
            sign = np.uint8(1 << (low + high))
            magnitude = np.uint8(sign - np.uint8(1))
            if form[2]:
                stream_bytes[: given.size - end] = given[end:]
                stream_bytes[given.size - end :] = 0
                escape = np.uint8(magnitude & ~((1 << low) - 1))
                for j in range(CODED_BLOCK):
                    flags[j] = np.uint8(128) if codes[j] & escape == escape else np.uint8(0)
                    more[j] = 0
                if _gather_tops(flags.view(np.uint64), np.uint64(0), masks[0]):
                    _read_rest(more.view(np.uint64), masks, stream, np.uint64(32 * form[2]))
            part, scale = block[b * CODED_BLOCK - start :], float_of(np.int32(scales[b]) << 16)
            for j in range(CODED_BLOCK):
                steps = np.int32(codes[j] & magnitude) + (np.int32(more[j]) << low if form[2] else np.int32(0))
                value = np.float32(2 * steps + 1) * scale
                part[j] = -value if codes[j] >= sign else value
        rotated, spare = butterflies(block, other, CODED_BLOCK)
        restore(rotated, spare, means, start, CODED_BLOCK, inner, seed, out)
