"""Values to packed codes and back, each in one pass: search, scale, round and pack; unpack and look up.

A program takes whole blocks of 2048 codes as eight pieces of 256, so that packing is shifting and adding what the same
thread holds. The last, shorter block of a tensor is a program of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import load_bytes, negative
from thinpipe.codecs.kernels.cuda.planes import BLOCK, PIECE, width_at

# Added to a float32 from 0 to 2^22, it leaves the nearest integer in the low bits, ties to even: 1.5 * 2^23.
ROUND = tl.constexpr(12582912.0)
ROUND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _search(values, thresholds, COUNT: tl.constexpr):
    """How many of COUNT - 1 rising thresholds lie below each value: few of them one by one, many by halving."""
    index = tl.zeros(values.shape, tl.int32)
    if COUNT <= 16:
        for i in tl.static_range(COUNT - 1):
            index += negative(tl.load(thresholds + i) - values)
    else:
        for halving in tl.static_range(1, 17):
            if (COUNT >> halving) > 0:
                above = values > tl.load(thresholds + index + ((COUNT >> halving) - 1))
                index += tl.where(above, COUNT >> halving, 0)
    return index


@triton.jit
def _code(values, parameters, BUCKETS: tl.constexpr, LEVEL_BITS: tl.constexpr):
    """bucket * 2^LEVEL_BITS + round((x*p - offset)*scale), as every machine computes it; without levels, the bucket.

    parameters: the last value of every bucket, its p, its offset, its scale.
    """
    if LEVEL_BITS == 0:
        return _search(values, parameters, BUCKETS)
    else:
        if BUCKETS <= 4:
            factor = tl.load(parameters + BUCKETS)
            offset = tl.load(parameters + 2 * BUCKETS)
            scale = tl.load(parameters + 3 * BUCKETS)
            base = 0
            for bucket in tl.static_range(1, BUCKETS):
                above = values > tl.load(parameters + bucket - 1)
                factor = tl.where(above, tl.load(parameters + BUCKETS + bucket), factor)
                offset = tl.where(above, tl.load(parameters + 2 * BUCKETS + bucket), offset)
                scale = tl.where(above, tl.load(parameters + 3 * BUCKETS + bucket), scale)
                base = tl.where(above, bucket << LEVEL_BITS, base)
        else:
            bucket = _search(values, parameters, BUCKETS)
            factor = tl.load(parameters + BUCKETS + bucket)
            offset = tl.load(parameters + 2 * BUCKETS + bucket)
            scale = tl.load(parameters + 3 * BUCKETS + bucket)
            base = bucket << LEVEL_BITS
        level = (values * factor - offset) * scale
        level = tl.minimum(tl.maximum(level, 0.0), (1 << LEVEL_BITS) - 1.0)  # NaN becomes 0
        return base + ((level + ROUND).to(tl.int32, bitcast=True) - ROUND_BITS)


@triton.jit
def _piece_code(x, places, mask, parameters, BUCKETS: tl.constexpr, LEVEL_BITS: tl.constexpr):
    values = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, _code(values, parameters, BUCKETS, LEVEL_BITS), 0)


@triton.jit
def _encode_pieces(
    x, places, step, limit, rows, row_step, mask, parameters,
    BITS: tl.constexpr, BUCKETS: tl.constexpr, LEVEL_BITS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Eight pieces, ``step`` values apart, into the rows of their planes, ``row_step`` bytes apart."""
    codes = (
        _piece_code(x, places, mask if WHOLE else mask & (places < limit), parameters, BUCKETS, LEVEL_BITS),
        _piece_code(x, places + step, mask if WHOLE else mask & (places + step < limit), parameters, BUCKETS, LEVEL_BITS),
        _piece_code(x, places + 2 * step, mask if WHOLE else mask & (places + 2 * step < limit), parameters, BUCKETS, LEVEL_BITS),
        _piece_code(x, places + 3 * step, mask if WHOLE else mask & (places + 3 * step < limit), parameters, BUCKETS, LEVEL_BITS),
        _piece_code(x, places + 4 * step, mask if WHOLE else mask & (places + 4 * step < limit), parameters, BUCKETS, LEVEL_BITS),
        _piece_code(x, places + 5 * step, mask if WHOLE else mask & (places + 5 * step < limit), parameters, BUCKETS, LEVEL_BITS),
        _piece_code(x, places + 6 * step, mask if WHOLE else mask & (places + 6 * step < limit), parameters, BUCKETS, LEVEL_BITS),
        _piece_code(x, places + 7 * step, mask if WHOLE else mask & (places + 7 * step < limit), parameters, BUCKETS, LEVEL_BITS),
    )  # fmt: skip
    for bit in tl.static_range(0, BITS):
        _store_plane(codes, rows, row_step, mask, bit, width_at(bit, BITS))


@triton.jit
def _store_plane(codes, rows, row_step, mask, BIT: tl.constexpr, WIDTH: tl.constexpr):
    """The plane of WIDTH bits of every code, from BIT on, if one starts there: WIDTH is 0 if not."""
    for g in tl.static_range(0, WIDTH):
        packed = (codes[g] >> BIT) & ((1 << WIDTH) - 1)
        for i in tl.static_range(1, 8 // WIDTH):
            packed |= ((codes[g + i * WIDTH] >> BIT) & ((1 << WIDTH) - 1)) << (i * WIDTH)
        tl.store(rows + (BIT + g) * row_step, packed.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["n"])
def encode_kernel(
    x, n, wire, scratch, HEADER: tl.constexpr, PARAMETERS: tl.constexpr,
    BITS: tl.constexpr, BUCKETS: tl.constexpr, LEVEL_BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """BLOCKS whole blocks for every program, and the last one's short block."""
    program = tl.program_id(0)
    wire += HEADER
    parameters = scratch + PARAMETERS
    whole = tl.cast(n // BLOCK, tl.int32)
    column = tl.arange(0, PIECE)[None, :]
    if program < tl.num_programs(0) - 1:
        block = program * BLOCKS + tl.arange(0, BLOCKS)[:, None]
        mask = tl.broadcast_to(block < whole, [BLOCKS, PIECE])
        wide = block.to(tl.int64)
        _encode_pieces(
            x, wide * BLOCK + column, PIECE, n, wire + wide * (PIECE * BITS) + column, PIECE, mask, parameters,
            BITS, BUCKETS, LEVEL_BITS, True,
        )  # fmt: skip
    else:
        start = whole.to(tl.int64) * BLOCK
        piece = tl.cdiv(n - start, 8)
        _encode_pieces(
            x, start + column, piece, n, wire + whole.to(tl.int64) * (PIECE * BITS) + column, piece, column < piece,
            parameters, BITS, BUCKETS, LEVEL_BITS, False,
        )  # fmt: skip


@triton.jit
def table_kernel(wire, table, BUCKETS: tl.constexpr, LEVEL_BITS: tl.constexpr, SIZE: tl.constexpr):
    """The value of every code, from the header: as thinpipe.codecs.layout.bucket_values, or the header itself."""
    code = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if LEVEL_BITS == 0:
        values = load_bytes(wire, code, code < BUCKETS)
    else:
        bucket = code >> LEVEL_BITS
        levels: tl.constexpr = (1 << LEVEL_BITS) - 1
        level = code & levels
        there = bucket < BUCKETS
        low = load_bytes(wire, bucket, there).to(tl.float64)
        high = load_bytes(wire, BUCKETS + bucket, there).to(tl.float64)
        part = (high - low) * level.to(tl.float64) / levels
        values = tl.where(level == levels, high, low + part).to(tl.float32)
    tl.store(table + code, values)


@triton.jit
def _decode_pieces(wire, row, row_step, out, places, step, limit, mask, table, BITS: tl.constexpr, WHOLE: tl.constexpr):
    for piece in tl.static_range(0, 8):
        code = tl.zeros(places.shape, tl.int32)
        for bit in tl.static_range(0, BITS):
            code |= _load_plane(wire + row, row_step, mask, piece, bit, width_at(bit, BITS), places)
        at = places + piece * step
        there = mask if WHOLE else mask & (at < limit)
        values = tl.load(table + code, mask=there, other=0.0)
        tl.store(out + at, values.to(out.dtype.element_ty), mask=there)


@triton.jit
def _load_plane(rows, row_step, mask, PIECE_INDEX: tl.constexpr, BIT: tl.constexpr, WIDTH: tl.constexpr, like):
    """What a plane adds to the codes of one piece; 0 if none starts at this bit."""
    part = tl.zeros(like.shape, tl.int32)
    if WIDTH > 0:
        packed = tl.load(rows + (BIT + PIECE_INDEX % WIDTH) * row_step, mask=mask, other=0).to(tl.int32)
        part = ((packed >> (PIECE_INDEX // WIDTH * WIDTH)) & ((1 << WIDTH) - 1)) << BIT
    return part


@triton.jit(do_not_specialize=["n"])
def decode_kernel(wire, table, out, n, HEADER: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """The inverse of encode_kernel, with the value of every code looked up."""
    program = tl.program_id(0)
    wire += HEADER
    whole = tl.cast(n // BLOCK, tl.int32)
    column = tl.arange(0, PIECE)[None, :]
    if program < tl.num_programs(0) - 1:
        block = program * BLOCKS + tl.arange(0, BLOCKS)[:, None]
        mask = tl.broadcast_to(block < whole, [BLOCKS, PIECE])
        wide = block.to(tl.int64)
        _decode_pieces(
            wire, wide * (PIECE * BITS) + column, PIECE, out, wide * BLOCK + column, PIECE, n, mask, table, BITS, True
        )
    else:
        start = whole.to(tl.int64) * BLOCK
        piece = tl.cdiv(n - start, 8)
        _decode_pieces(
            wire, whole.to(tl.int64) * (PIECE * BITS) + column, piece, out, start + column, piece, n, column < piece,
            table, BITS, False,
        )  # fmt: skip
