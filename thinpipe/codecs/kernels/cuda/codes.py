"""Quantization to packed codes and back, each in one pass: search, scale, round and pack; unpack and look up.

Every program has one block of 2048 codes. The remainder of a tensor after full blocks is a separate launch of one
program.
"""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import bits_of, load_bytes, negative
from thinpipe.codecs.kernels.cuda.planes import (
    BLOCK,
    PIECE,
    load_codes,
    load_short_codes,
    store_codes,
    store_short_codes,
)

# Added to a float32 from 0 to 2^22, it leaves the nearest integer in the low bits, ties to even: 1.5 * 2^23.
ROUND = tl.constexpr(12582912.0)
ROUND_BITS = tl.constexpr(0x4B400000)

# Quantization parameters of buckets, float32 values: the last value of each, its p, its offset and scale as a pair, and
# finally 1 if every p is 1. Codebooks have only the thresholds between their values.
MOST_BUCKETS = 256
FACTORS = tl.constexpr(MOST_BUCKETS)
PAIRS = tl.constexpr(2 * MOST_BUCKETS)
ORDINARY = tl.constexpr(4 * MOST_BUCKETS)
PARAMETERS = ORDINARY.value + 1

LOOKED_UP = tl.constexpr(12)  # bits of codes, at most, whose values are looked up: a larger table leaves the cache


@triton.jit
def bucket_of(values, thresholds, BUCKETS: tl.constexpr):
    """Return how many of the first BUCKETS - 1 rising thresholds are below each value.

    Up to eight buckets use a linear search; more, the quarters and then a binary search.
    """
    FIRST: tl.constexpr = BUCKETS if BUCKETS <= 8 else 4
    STEP: tl.constexpr = BUCKETS // FIRST
    index = tl.zeros(values.shape, tl.int32)
    for i in range(FIRST - 1):
        index += negative(tl.load(thresholds + i * STEP + (STEP - 1)) - values)
    if STEP > 1:
        index *= STEP
        half = STEP // 2
        for _ in range(bits_of(STEP)):
            index += tl.where(values > tl.load(thresholds + (index + (half - 1))), half, 0)
            half = half // 2
    return index


@triton.jit
def _codes_of(values, parameters, BUCKETS: tl.constexpr, LEVEL_BITS: tl.constexpr):
    """Return bucket * 2^LEVEL_BITS + round((x*p - offset)*scale), bit-identical on every machine.

    Without levels, return the bucket.
    """
    if LEVEL_BITS == 0:
        return bucket_of(values, parameters, BUCKETS)
    else:
        ordinary = tl.load(parameters + ORDINARY) == 1
        if BUCKETS == 1:
            if ~ordinary:
                values = values * tl.load(parameters + FACTORS)
            offset, scale = tl.load(parameters + PAIRS), tl.load(parameters + PAIRS + 1)
            base = 0
        else:
            bucket = bucket_of(values, parameters, BUCKETS)
            if ~ordinary:
                values = values * tl.load(parameters + FACTORS + bucket)
            pair = tl.load((parameters + PAIRS).to(tl.pointer_type(tl.int64)) + bucket)  # one load for both
            offset = pair.to(tl.int32).to(tl.float32, bitcast=True)
            scale = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            base = bucket << LEVEL_BITS
        level = (values - offset) * scale
        level = tl.minimum(tl.maximum(level, 0.0), (1 << LEVEL_BITS) - 1.0)  # NaN becomes 0
        return base + ((level + ROUND).to(tl.int32, bitcast=True) - ROUND_BITS)


@triton.jit
def encode_kernel(x, wire, parameters, header, BITS: tl.constexpr, BUCKETS: tl.constexpr, LEVEL_BITS: tl.constexpr):
    """Encode one full block per program."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    values = tl.load(x + start + tl.arange(0, BLOCK)).to(tl.float32)
    codes = _codes_of(values, parameters, BUCKETS, LEVEL_BITS)
    store_codes(codes, wire + header + start // 8 * BITS, BITS, BLOCK)


@triton.jit(do_not_specialize=["n"])
def encode_rest_kernel(
    x, n, wire, parameters, header, BITS: tl.constexpr, BUCKETS: tl.constexpr, LEVEL_BITS: tl.constexpr
):
    """Encode the remainder after full blocks; values are loaded piece by piece, in the order of their codes."""
    start = tl.cast(n, tl.int64) // BLOCK * BLOCK
    piece = tl.cast(tl.cdiv(n - start, 8), tl.int32)
    index = tl.arange(0, BLOCK)
    places = start + index // PIECE * piece + index % PIECE
    there = (index % PIECE < piece) & (places < n)
    values = tl.load(x + places, mask=there, other=0.0).to(tl.float32)
    codes = tl.where(there, _codes_of(values, parameters, BUCKETS, LEVEL_BITS), 0)
    store_short_codes(codes, piece, wire + header + start // 8 * BITS, BITS)


@triton.jit
def table_kernel(wire, table, BITS: tl.constexpr, BUCKETS: tl.constexpr, LEVEL_BITS: tl.constexpr, SIZE: tl.constexpr):
    """Store the table for decoding: the value of every code; of many codes, each bucket's least value and extent.

    As in thinpipe.codecs.layout.bucket_values; without levels, the table is the header itself.
    """
    code = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if LEVEL_BITS == 0:
        tl.store(table + code, load_bytes(wire, code, code < BUCKETS))
    else:
        levels: tl.constexpr = (1 << LEVEL_BITS) - 1
        MANY: tl.constexpr = BITS > LOOKED_UP
        bucket = code if MANY else code >> LEVEL_BITS
        there = bucket < BUCKETS
        low = load_bytes(wire, bucket, there).to(tl.float64)
        high = load_bytes(wire, BUCKETS + bucket, there).to(tl.float64)
        if MANY:
            pairs = table.to(tl.pointer_type(tl.float64))
            tl.store(pairs + 2 * bucket, low, mask=there)
            tl.store(pairs + 2 * bucket + 1, high - low, mask=there)
            tl.store(pairs + 2 * BUCKETS + bucket, high, mask=there)
        else:
            level = code & levels
            part = (high - low) * level.to(tl.float64) / levels
            tl.store(table + code, tl.where(level == levels, high, low + part).to(tl.float32))


@triton.jit
def _values_of(codes, table, BITS: tl.constexpr, LEVEL_BITS: tl.constexpr):
    """Return the value of every code, from the table of table_kernel."""
    if BITS <= LOOKED_UP:
        return tl.load(table + codes)
    else:
        levels: tl.constexpr = (1 << LEVEL_BITS) - 1
        bucket, level = codes >> LEVEL_BITS, codes & levels
        pairs = table.to(tl.pointer_type(tl.float64))
        low, span = tl.load(pairs + 2 * bucket), tl.load(pairs + 2 * bucket + 1)
        values = low + _divided(span * level.to(tl.float64), levels)
        highs = pairs + (2 << (BITS - LEVEL_BITS))
        high = tl.load(highs + bucket, mask=level == levels, other=0.0)
        return tl.where(level == levels, high, values).to(tl.float32)


@triton.jit
def _divided(product, levels: tl.constexpr):
    """Return product / levels, correctly rounded.

    Two corrections by the remainder take a third of a division's time.
    """
    inverse = tl.full(product.shape, 1.0 / levels, tl.float64)
    divisor = tl.full(product.shape, levels, tl.float64)
    quotient = product * inverse
    quotient = tl.fma(tl.fma(-quotient, divisor, product), inverse, quotient)
    return tl.fma(tl.fma(-quotient, divisor, product), inverse, quotient)


@triton.jit
def decode_kernel(wire, table, out, header, BITS: tl.constexpr, LEVEL_BITS: tl.constexpr):
    """Decode one full block per program: the inverse of encode_kernel."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    codes = load_codes(wire + header + start // 8 * BITS, BITS, BLOCK)
    values = _values_of(codes, table, BITS, LEVEL_BITS)
    tl.store(out + start + tl.arange(0, BLOCK), values.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["n"])
def decode_rest_kernel(wire, table, out, n, header, BITS: tl.constexpr, LEVEL_BITS: tl.constexpr):
    """Decode the remainder after full blocks: the inverse of encode_rest_kernel."""
    start = tl.cast(n, tl.int64) // BLOCK * BLOCK
    codes = load_short_codes(wire + header + start // 8 * BITS, n - start, BITS, BLOCK)
    places = start + tl.arange(0, BLOCK)
    values = _values_of(codes, table, BITS, LEVEL_BITS)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=places < n)
