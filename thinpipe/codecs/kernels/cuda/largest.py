"""Keeping the largest values in the tensor's order, and putting them back: blocks count first, then know their place."""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import load_bytes, load_values, store_bytes

BLOCK = tl.constexpr(4096)
BYTES = tl.constexpr(512)  # of a mask, for a block


@triton.jit(do_not_specialize=["n"])
def count_largest_kernel(x, n, scratch, counts, THRESHOLD: tl.constexpr):
    """Of every block: how many magnitudes are above the threshold, and how many are equal to it."""
    block = tl.program_id(0)
    places = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = places < n
    magnitude = load_values(x, places, there, True)
    threshold = tl.load(scratch + THRESHOLD)
    tl.store(counts + 2 * block, tl.sum((there & (magnitude > threshold)).to(tl.int64), axis=0))
    tl.store(counts + 2 * block + 1, tl.sum((there & (magnitude == threshold)).to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["n", "kept", "blocks"])
def keep_largest_kernel(x, n, wire, scratch, reached, kept, blocks, THRESHOLD: tl.constexpr, AS_BITS: tl.constexpr):
    """Write the values of a block above the threshold, and of those equal to it the first ones of the tensor.

    reached: the counts of count_largest_kernel, summed up to and with each block.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    places = block.to(tl.int64) * BLOCK + lanes
    there = places < n
    magnitude = load_values(x, places, there, True)
    threshold = tl.load(scratch + THRESHOLD)
    missing = kept - tl.load(reached + 2 * (blocks - 1))  # values equal to the threshold that fill up the count
    before = tl.where(block > 0, tl.load(reached + 2 * block - 2, mask=block > 0, other=0), 0)
    equal_before = tl.where(block > 0, tl.load(reached + 2 * block - 1, mask=block > 0, other=0), 0)
    equal = (there & (magnitude == threshold)).to(tl.int64)
    taken = (there & (magnitude > threshold)) | ((equal > 0) & (equal_before + tl.cumsum(equal, axis=0) <= missing))
    chosen = taken.to(tl.int64)
    place = before + tl.minimum(equal_before, missing) + tl.cumsum(chosen, axis=0) - chosen
    values = tl.load(x + places, mask=there, other=0.0).to(tl.float32)
    store_bytes(wire, place, values, taken)
    if AS_BITS:
        bits = tl.reshape(chosen.to(tl.int32), [BYTES, 8]) << tl.arange(0, 8)[None, :]
        at = block.to(tl.int64) * BYTES + tl.arange(0, BYTES)
        tl.store(wire + 4 * tl.cast(kept, tl.int64) + at, tl.sum(bits, axis=1).to(tl.uint8), mask=at < tl.cdiv(n, 8))
    else:
        where = places.to(tl.int32).to(tl.float32, bitcast=True)
        store_bytes(wire + 4 * tl.cast(kept, tl.int64), place, where, taken)


@triton.jit
def _load_mask(mask, block, n):
    """The bits of a block, as 0 and 1; beyond the last value 0, whatever the mask says there."""
    at = block.to(tl.int64) * BYTES + tl.arange(0, BYTES)
    packed = tl.load(mask + at, mask=at < tl.cdiv(n, 8), other=0).to(tl.int32)
    bits = tl.reshape((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1, [BLOCK])
    places = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tl.where(places < n, bits, 0).to(tl.int64), places


@triton.jit(do_not_specialize=["n", "kept"])
def count_bits_kernel(wire, n, kept, counts):
    block = tl.program_id(0)
    bits, _ = _load_mask(wire + 4 * tl.cast(kept, tl.int64), block, n)
    tl.store(counts + block, tl.sum(bits, axis=0))


@triton.jit(do_not_specialize=["n", "kept"])
def place_by_bits_kernel(wire, out, n, kept, reached):
    """The next value where a bit is set, zero elsewhere and once the values run out."""
    block = tl.program_id(0)
    bits, places = _load_mask(wire + 4 * tl.cast(kept, tl.int64), block, n)
    index = tl.load(reached + block - 1, mask=block > 0, other=0) + tl.cumsum(bits, axis=0) - bits
    values = load_bytes(wire, index, (bits > 0) & (index < kept))
    tl.store(out + places, values.to(out.dtype.element_ty), mask=places < n)


@triton.jit(do_not_specialize=["n", "kept"])
def place_by_index_kernel(wire, out, n, kept):
    """Values at their positions, into zeros; positions outside are passed over."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = index < kept
    values = load_bytes(wire, index, there)
    places = load_bytes(wire + 4 * tl.cast(kept, tl.int64), index, there).to(tl.int32, bitcast=True)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=there & (places >= 0) & (places < n))
