"""Conversion of every float type to float32 and back, and to integer keys of the same order.

A key is the bits of a float32 as an int32, with all bits but the sign flipped for negative values, so that integer
order is the order of the floats (-0 just below +0, infinities at the ends, NaN beyond them).
    1.0 -> 0x3f800000 -> key 1065353216        -1.0 -> 0xbf800000 -> key -1065353217

The dtype of an array identifies its contents: float32 and float64 themselves, int16 the bits of bfloat16, uint16 the
bits of float16, int32 keys.
"""

import numpy as np
from numba import types
from numba.extending import overload

from thinpipe.codecs.kernels.cpu.compiling import jit

MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)
_GREATEST = np.int32(0x7FFFFFFE)  # one NaN is lowered to this, so that every key is below 0x7FFFFFFF
_HALF_REBIAS = np.float32(2.0**112)  # factor by which float16 bits shifted into a float32 are too small
_HALF = np.float32(0.5)


@jit
def bits_of(x):
    """Return the bits of a float32 as an int32. A separate function: numba views only variables that are set once."""
    return np.float32(x).view(np.int32)


@jit
def float_of(bits):
    return np.int32(bits).view(np.float32)


def load_values(x, start, count, block):
    raise AssertionError("compiled only")


@overload(load_values, jit_options={"error_model": "numpy"})
def _load_by_type(x, start, count, block):
    """Return values start..start+count of x as float32: a view if x is float32, else converted into block."""
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


def store_values(values, out):
    raise AssertionError("compiled only")


@overload(store_values, jit_options={"error_model": "numpy"})
def _store_by_type(values, out):
    """Write float32 values to out, rounded to its type, halfway to even: the inverse of load_values."""
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
                size = np.int32(bits[j] & MAGNITUDE)
                # Below 2^-14 float16 values have the spacing of float32 from 0.5 on: adding 0.5 rounds.
                small = np.int32(bits_of(abs(values[j]) + _HALF) - bits_of(_HALF))
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


def load_keys(x, start, count, block, keys, magnitude):
    raise AssertionError("compiled only")


@overload(load_keys, jit_options={"error_model": "numpy"})
def _load_keys_by_type(x, start, count, block, keys, magnitude):
    """Write the keys of values start..start+count of x, or of their magnitudes, to keys."""
    if x.dtype == types.int32:

        def copy(x, start, count, block, keys, magnitude):
            for j in range(count):
                keys[j] = x[start + j]

        return copy

    def from_floats(x, start, count, block, keys, magnitude):
        bits = load_values(x, start, count, block).view(np.int32)
        if magnitude:
            for j in range(count):
                keys[j] = min(bits[j] & MAGNITUDE, INFINITY)  # NaN counts as infinity
        else:
            for j in range(count):
                keys[j] = min(bits[j] ^ ((bits[j] >> 31) & MAGNITUDE), _GREATEST)

    return from_floats
