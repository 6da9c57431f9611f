"""Keeping the largest values in the tensor's order, and putting them back: blocks count first, then know their place."""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import load_bytes, plain, store_bytes

STEP = tl.constexpr(4096)  # values at a time
STEPS = tl.constexpr(4)  # of a block
BLOCK = tl.constexpr(STEP.value * STEPS.value)
BYTES = tl.constexpr(STEP.value // 8)  # of a mask


@triton.jit
def _places(step):
    return tl.program_id(0).to(tl.int64) * BLOCK + step * STEP + tl.arange(0, STEP)


@triton.jit(do_not_specialize=["n"])
def count_largest_kernel(x, n, threshold, counts):
    """Of every block: how many magnitudes are above the threshold, and behind these of all blocks, how many equal it."""
    limit = tl.load(threshold)
    above, equal = tl.zeros([STEP], tl.int32), tl.zeros([STEP], tl.int32)
    for step in range(STEPS):
        places = _places(step)
        magnitude = plain(tl.load(x + places, mask=places < n, other=0.0), True)
        above += ((places < n) & (magnitude > limit)).to(tl.int32)
        equal += ((places < n) & (magnitude == limit)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(above, axis=0).to(tl.int64))
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), tl.sum(equal, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def sum_up_kernel(counts, count):
    """Each of so many counts, and all before it. A program has one list of them."""
    MANY: tl.constexpr = 4096
    counts += tl.program_id(0) * count
    reached = tl.zeros([], tl.int64)
    for start in range(0, count, MANY):
        lanes = start + tl.arange(0, MANY)
        each = tl.load(counts + lanes, mask=lanes < count, other=0)
        tl.store(counts + lanes, reached + tl.cumsum(each, axis=0), mask=lanes < count)
        reached += tl.sum(each, axis=0)


@triton.jit
def _store_float(wire, index, values, mask, ALIGNED: tl.constexpr):
    if ALIGNED:
        tl.store(wire.to(tl.pointer_type(tl.float32)) + index, values, mask=mask)
    else:
        store_bytes(wire, index, values, mask)


@triton.jit
def _load_float(wire, index, mask, ALIGNED: tl.constexpr):
    if ALIGNED:
        return tl.load(wire.to(tl.pointer_type(tl.float32)) + index, mask=mask, other=0.0)
    else:
        return load_bytes(wire, index, mask)


@triton.jit
def _before(reached, block):
    return tl.load(reached + block - 1, mask=block > 0, other=0)


@triton.jit(do_not_specialize=["n", "kept"])
def keep_largest_kernel(x, n, wire, threshold, reached, kept, AS_BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """Write the values of a block above the threshold, and of those equal to it the first ones of the tensor.

    reached: the counts of count_largest_kernel, summed up.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    limit = tl.load(threshold)
    missing = kept - tl.load(reached + blocks - 1)  # values equal to the threshold that fill up the count
    equal_before = _before(reached + blocks, block)
    place = _before(reached, block) + tl.minimum(equal_before, missing)
    positions = wire + 4 * tl.cast(kept, tl.int64)
    for step in range(STEPS):
        places = _places(step)
        there = places < n
        values = tl.load(x + places, mask=there, other=0.0).to(tl.float32)
        magnitude = plain(values, True)
        equal = there & (magnitude == limit)
        equals = tl.sum(equal.to(tl.int32), axis=0)
        taken = there & (magnitude > limit)
        if (equals > 0) & (equal_before < missing):
            among = equal_before + tl.cumsum(equal.to(tl.int32), axis=0)
            taken |= equal & (among <= missing)
        equal_before += equals
        chosen = taken.to(tl.int32)
        upto = tl.cumsum(chosen, axis=0)
        at = place + upto - chosen
        _store_float(wire, at, values, taken, ALIGNED)
        if AS_BITS:
            bits = tl.reshape(chosen, [BYTES, 8]) << tl.arange(0, 8)[None, :]
            byte = (block.to(tl.int64) * STEPS + step) * BYTES + tl.arange(0, BYTES)
            tl.store(positions + byte, tl.sum(bits, axis=1).to(tl.uint8), mask=byte < tl.cdiv(n, 8))
        else:
            _store_float(positions, at, places.to(tl.int32).to(tl.float32, bitcast=True), taken, ALIGNED)
        place += tl.sum(chosen, axis=0)


@triton.jit
def _load_mask(mask, step, n):
    """The bits of a step, as 0 and 1; beyond the last value 0, whatever the mask says there."""
    byte = (tl.program_id(0).to(tl.int64) * STEPS + step) * BYTES + tl.arange(0, BYTES)
    packed = tl.load(mask + byte, mask=byte < tl.cdiv(n, 8), other=0).to(tl.int32)
    bits = tl.reshape((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1, [STEP])
    places = _places(step)
    return tl.where(places < n, bits, 0), places


@triton.jit(do_not_specialize=["n", "kept"])
def count_bits_kernel(wire, n, kept, counts):
    counted = tl.zeros([STEP], tl.int32)
    for step in range(STEPS):
        bits, _ = _load_mask(wire + 4 * tl.cast(kept, tl.int64), step, n)
        counted += bits
    tl.store(counts + tl.program_id(0), tl.sum(counted, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["n", "kept"])
def place_by_bits_kernel(wire, out, n, kept, reached, ALIGNED: tl.constexpr):
    """The next value where a bit is set, zero elsewhere and once the values run out."""
    place = _before(reached, tl.program_id(0))
    for step in range(STEPS):
        bits, places = _load_mask(wire + 4 * tl.cast(kept, tl.int64), step, n)
        index = place + tl.cumsum(bits, axis=0) - bits
        values = _load_float(wire, index, (bits > 0) & (index < kept), ALIGNED)
        tl.store(out + places, values.to(out.dtype.element_ty), mask=places < n)
        place += tl.sum(bits, axis=0)


@triton.jit(do_not_specialize=["n", "kept"])
def place_by_index_kernel(wire, out, n, kept, ALIGNED: tl.constexpr):
    """Values at their positions, into zeros; positions outside are passed over."""
    index = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    there = index < kept
    values = _load_float(wire, index, there, ALIGNED)
    positions = _load_float(wire + 4 * tl.cast(kept, tl.int64), index, there, ALIGNED)
    places = positions.to(tl.int32, bitcast=True)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=there & (places >= 0) & (places < n))
