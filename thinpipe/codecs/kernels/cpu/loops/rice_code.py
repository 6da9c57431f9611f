"""Encoding and decoding of rotated blocks in the variant of the Golomb-Rice code of thinpipe.codecs.golomb_rice."""

import numpy as np

from thinpipe.codecs.golomb_rice import CODED_BLOCK, GROWTH, LARGEST_SIZE, LIMITS, MOST_STEPS, TURNS
from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.kernels.cpu.loops.bitplanes import from_planes, to_planes
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


@jit
def find_energies(x, negated, energies, first, last, inner, seed):
    """Write the energies of the blocks of units first..last of x."""
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    for start in range(first * UNIT, last * UNIT, UNIT):
        rotated, _ = rotate(x, negated, start, CODED_BLOCK, inner, seed, block, other)
        for b in range(start // CODED_BLOCK, min((start + UNIT) // CODED_BLOCK, energies.size)):
            part = rotated[b * CODED_BLOCK - start : (b + 1) * CODED_BLOCK - start]
            largest, energy = largest_of(part), np.int32(0)
            if LEAST <= largest < HUGE:
                power = np.int32(largest & INFINITY)
                squares = bits_of(np.float32(squares_of(part, power)))
                energy = np.int32((squares >> GAUSS_ENERGY) + (power >> (GAUSS_ENERGY - 1)))
            energies[b] = energy


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
def _find_magnitudes(part, largest, form, step, magnitudes):
    """Write the magnitudes of a block with a scale; return half a low step, in units of the power of two p."""
    low, high, rest = np.int32(form[0]), np.int32(form[1]), form[2]
    power = np.int32(largest & INFINITY)
    inverse = float_of(2 * ONE - power)
    width = np.sqrt(np.float32(squares_of(part, power)) * np.float32(2.0**-16 / CODED_BLOCK)) * step
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
def _unbiased(part, power, magnitudes):
    """Return the half step with which <decoded block, block> = <block, block>, up to rounding."""
    factor = float_of(2 * ONE - power) * np.float32(2.0**8)
    products = np.int32(0)
    for j in range(part.size):
        products += np.int32(abs(part[j] * factor) * np.float32(2 * magnitudes[j] + 1))
    return np.float32(squares_of(part, power)) / np.float32(products) * np.float32(2.0**-8)


@jit
def _write_rest(magnitudes, low, escape, more, out):
    """Write the interleaved unary codes (n ones and a zero) of the values whose high bits are all ones.

    The first bits of all codes come first, then the second bits, and so on. Branch-free, because the branches would be
    unpredictable.
    """
    out[:] = 0
    count = 0
    for j in range(magnitudes.size):
        above = (magnitudes[j] >> low) - escape
        more[count] = above
        count += above >= 0
    place, byte = 0, 0
    while count:
        left = 0
        for i in range(count):
            one = more[i] > 0
            byte |= one << (place & 7)
            more[left] = more[i] - 1
            left += one
            place += 1
            if place & 7 == 0:
                out[(place >> 3) - 1] = byte
                byte = 0
        count = left
    if place & 7:
        out[place >> 3] = byte


@jit
def encode_coded_blocks(x, negated, scales, starts, payload, first, last, inner, forms, steps, unbiased, seed):
    """Encode units first..last of x; rotates them again, because keeping them would take as much memory as x.

    starts: offsets of blocks in 4-byte units, and the end. payload: bytes of all blocks. forms: low, high, rest by
    size.
    """
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    magnitudes, more = np.empty(CODED_BLOCK, np.int32), np.empty(CODED_BLOCK + 1, np.int32)
    codes = np.empty(CODED_BLOCK, np.uint8)
    for start in range(first * UNIT, last * UNIT, UNIT):
        rotated, _ = rotate(x, negated, start, CODED_BLOCK, inner, seed, block, other)
        for b in range(start // CODED_BLOCK, min((start + UNIT) // CODED_BLOCK, scales.size)):
            part = rotated[b * CODED_BLOCK - start : (b + 1) * CODED_BLOCK - start]
            target = payload[4 * starts[b] : 4 * starts[b + 1]]
            largest, size = largest_of(part), starts[b + 1] - starts[b]
            form = forms[size]
            if largest >= HUGE or largest < LEAST:
                scales[b] = NAN_BITS if largest >= HUGE else 0
                target[:] = 0
                continue
            power = np.int32(largest & INFINITY)
            half = _find_magnitudes(part, largest, form, steps[size], magnitudes)
            if unbiased:
                half = _unbiased(part, power, magnitudes)
            half = float_of(nearest_bfloat16(half)) * np.float32(1 / CODED_BLOCK)
            scales[b] = np.uint16(bits_of(half * float_of(power)) >> 16)
            low, high = np.int32(form[0]), np.int32(form[1])
            mask, escape, sign = np.int32((1 << low) - 1), np.int32((1 << high) - 1), np.int32(1 << (low + high))
            for j in range(CODED_BLOCK):
                steps_of = magnitudes[j]
                code = (steps_of & mask) | (min(steps_of >> low, escape) << low)
                codes[j] = np.uint8(code + (sign if part[j] < 0 else np.int32(0)))
            planes = low + high + 1
            to_planes(codes, target[: planes * _PLANE].reshape(planes, _PLANE))
            if form[2]:
                _write_rest(magnitudes, low, escape, more, target[planes * _PLANE :])


@jit
def _read_rest(magnitudes, low, escape, given, present):
    """Add the unary codes of _write_rest to magnitudes. Bits beyond the end are zero."""
    count = 0
    for j in range(magnitudes.size):
        present[count] = j
        count += magnitudes[j] >> low == escape
    place, end = 0, 8 * given.size
    for _ in range(MOST_STEPS):
        left = 0
        for i in range(min(count, end - place)):
            one = (given[place >> 3] >> np.uint8(place & 7)) & np.uint8(1)
            magnitudes[present[i]] += np.int32(one) << low
            present[left] = present[i]
            left += one
            place += 1
        count = left


@jit
def decode_coded_blocks(payload, scales, starts, means, out, first, last, inner, forms, seed):
    """Decode units first..last of out."""
    block, other = np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
    codes, padded = np.empty(CODED_BLOCK, np.uint8), np.empty(4 * LARGEST_SIZE, np.uint8)
    magnitudes, present = np.empty(CODED_BLOCK, np.int32), np.empty(CODED_BLOCK + 1, np.int32)
    for start in range(first * UNIT, last * UNIT, UNIT):
        for b in range(start // CODED_BLOCK, min((start + UNIT) // CODED_BLOCK, scales.size)):
            given, size = payload[4 * starts[b] : 4 * starts[b + 1]], starts[b + 1] - starts[b]
            form = forms[size]
            if given.size < 4 * size:  # damaged wire: a block may reach beyond its end, where it is zeros
                padded[:] = 0
                padded[: given.size] = given
                given = padded[: 4 * size]
            low, high = np.int32(form[0]), np.int32(form[1])
            planes = low + high + 1
            from_planes(given[: planes * _PLANE].reshape(planes, _PLANE), codes)
            sign = np.uint8(1 << (low + high))
            for j in range(CODED_BLOCK):
                magnitudes[j] = codes[j] & np.uint8(sign - np.uint8(1))
            if form[2]:
                _read_rest(magnitudes, low, np.int32((1 << high) - 1), given[planes * _PLANE :], present)
            part, scale = block[b * CODED_BLOCK - start :], float_of(np.int32(scales[b]) << 16)
            for j in range(CODED_BLOCK):
                value = np.float32(2 * magnitudes[j] + 1) * scale
                part[j] = -value if codes[j] >= sign else value
        rotated, spare = butterflies(block, other, CODED_BLOCK)
        restore(rotated, spare, means, start, CODED_BLOCK, inner, seed, out)
