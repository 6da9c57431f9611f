"""Packing of codes to the bit planes of the wire and back, as in thinpipe.codecs.layout.

A span is one block of 2048 codes, or two. One warp or two hold it, so that codes 256 apart are in one thread, and
packing needs no exchange between threads. The remainder of a tensor after full blocks is stored in shorter pieces.
"""

import triton
import triton.language as tl

from thinpipe.codecs.layout import BLOCK as _BLOCK
from thinpipe.codecs.layout import PIECE as _PIECE

PIECE = tl.constexpr(_PIECE)
BLOCK = tl.constexpr(_BLOCK)


@triton.constexpr_function
def width_at(bit, bits):
    """Return the width of the plane that starts at a bit of a code; 0 if none does."""
    start = 0
    while start < bits:
        width = next(w for w in (8, 4, 2, 1) if start + w <= bits)
        if start == bit:
            return width
        start += width
    return 0


@triton.jit
def store_codes(codes, wire, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Pack and store the codes of full blocks."""
    for bit in tl.static_range(BITS):
        _store_plane(codes, wire, PIECE, bit, width_at(bit, BITS), BITS, SPAN // BLOCK, False)


@triton.jit
def store_short_codes(codes, piece, wire, BITS: tl.constexpr):
    """Pack and store the codes of a block with shorter pieces.

    In ``codes`` each piece starts where it does in a full block.
    """
    for bit in tl.static_range(BITS):
        _store_plane(codes, wire, piece, bit, width_at(bit, BITS), BITS, 1, True)


@triton.jit
def store_fewer_codes(codes, count, spare, wire, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Pack and store the first ``count`` codes of a span.

    They are stored in shorter pieces, and therefore rearranged in spare memory.
    """
    tl.store(spare + tl.arange(0, SPAN), codes.to(tl.uint8))
    tl.debug_barrier()
    index = tl.arange(0, BLOCK)
    for block in tl.static_range(SPAN // BLOCK):
        held = tl.minimum(tl.maximum(count - block * BLOCK, 0), BLOCK)
        piece = tl.cdiv(held, 8)
        at = index // PIECE * piece + index % PIECE
        there = (index % PIECE < piece) & (at < held)
        codes = tl.load(spare + block * BLOCK + at, mask=there, other=0).to(tl.int32)
        store_short_codes(codes, piece, wire + block * (PIECE * BITS), BITS)


@triton.jit
def _store_plane(
    codes, wire, piece, BIT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, SHORT: tl.constexpr
):  # fmt: skip
    """Store the plane of WIDTH bits of every code, from BIT on; WIDTH is 0 if none starts there."""
    if WIDTH > 0:
        parts = tl.reshape((codes >> BIT) & ((1 << WIDTH) - 1), [BLOCKS, 8 // WIDTH, WIDTH, PIECE])
        shifts = tl.reshape(tl.arange(0, 8 // WIDTH) * WIDTH, [1, 8 // WIDTH, 1, 1])
        packed = tl.reshape(tl.sum(parts << shifts, axis=1), [BLOCKS * WIDTH * PIECE]).to(tl.uint8)
        index = tl.arange(0, BLOCKS * WIDTH * PIECE)
        row, column = index // PIECE, index % PIECE
        if SHORT:
            tl.store(wire + (BIT + row) * piece + column, packed, mask=column < piece)
        else:
            place = (row // WIDTH) * (PIECE * BITS) + (BIT + row % WIDTH) * PIECE + column
            tl.store(wire + tl.max_contiguous(place, PIECE), packed)


@triton.jit
def load_codes(wire, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Load and unpack the codes of full blocks: the inverse of store_codes."""
    codes = tl.zeros([SPAN], tl.int32)
    for bit in tl.static_range(BITS):
        codes |= _load_plane(wire, bit, width_at(bit, BITS), BITS, SPAN)
    return codes


@triton.jit
def _load_plane(wire, BIT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Return a plane's contribution to the codes of full blocks; 0 if none starts at this bit."""
    if WIDTH > 0:
        BLOCKS: tl.constexpr = SPAN // BLOCK
        index = tl.arange(0, BLOCKS * WIDTH * PIECE)
        row = index // PIECE
        place = (row // WIDTH) * (PIECE * BITS) + (BIT + row % WIDTH) * PIECE + index % PIECE
        packed = tl.load(wire + tl.max_contiguous(place, PIECE)).to(tl.int32)
        packed = tl.reshape(packed, [BLOCKS, 1, WIDTH, PIECE])
        shifts = tl.reshape(tl.arange(0, 8 // WIDTH) * WIDTH, [1, 8 // WIDTH, 1, 1])
        return tl.reshape(((packed >> shifts) & ((1 << WIDTH) - 1)) << BIT, [SPAN])
    else:
        return tl.zeros([SPAN], tl.int32)


@triton.jit
def load_short_codes(wire, count, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Load and unpack ``count`` codes, fewer than a span, in the tensor's order; those beyond are undefined."""
    codes = tl.zeros([SPAN], tl.int32)
    for bit in tl.static_range(BITS):
        codes |= _load_short_plane(wire, count, bit, width_at(bit, BITS), BITS, SPAN)
    return codes


@triton.jit
def _load_short_plane(wire, count, BIT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr):
    if WIDTH > 0:
        place = tl.arange(0, SPAN)
        block = place // BLOCK
        held = tl.minimum(count - block * BLOCK, BLOCK)
        piece = tl.maximum((held + 7) // 8, 1)
        within = place % BLOCK
        at = block * (PIECE * BITS) + (BIT + (within // piece) % WIDTH) * piece + within % piece
        packed = tl.load(wire + at, mask=place < count, other=0).to(tl.int32)
        return ((packed >> ((within // piece) // WIDTH * WIDTH).to(tl.int32)) & ((1 << WIDTH) - 1)) << BIT
    else:
        return tl.zeros([SPAN], tl.int32)
