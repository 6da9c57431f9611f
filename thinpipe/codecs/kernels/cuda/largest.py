"""Top-k sparsification: keeps the largest values in the tensor's order, by counts and prefix sums, and puts them back.

A block belongs to one warp, which processes 512 values at a time, 16 per thread. They are in load order: VECTOR in a
row, then those of the next thread, and after the last thread's the next ones of the first. Each thread packs the counts
of all its rows into fields of one number, so that one prefix sum over the threads gives the start of every row.

Blocks are counted in groups. Every block adds up the counts of all groups before its own itself: that takes less time
than one more launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinpipe.codecs.kernels.cuda.counting import EACH, columns_of, span_of
from thinpipe.codecs.kernels.cuda.device import load_bytes, plain, store_bytes

THREADS = tl.constexpr(32)
STEP = tl.constexpr(THREADS.value * EACH.value)  # values at a time
BYTES = tl.constexpr(STEP.value // 8)  # of a step's mask
SOME = tl.constexpr(4)  # steps at once where values are only counted
GROUP = tl.constexpr(4)  # blocks that one program counts
WARPS = tl.constexpr(4)  # per counting program
SUMS = tl.constexpr(512)  # groups that a block sums up at a time
BLOCKS = tl.constexpr(SUMS.value * GROUP.value)  # at most, unless they would have more than 32 steps


def parts_of(x: Tensor) -> tuple[int, int, int, Tensor]:
    """Return the steps of a block, the number of blocks and of groups, and memory for their counts.

    Steps are a multiple of SOME: enough blocks for all processors, and not too many to sum up, SUMS groups in an int32.
    """
    n, shortest = x.numel(), SOME.value * STEP.value * BLOCKS.value  # values of BLOCKS blocks with the fewest steps
    steps = SOME.value * max(min(8, -(-n // shortest)), min(256, n // (4 * shortest)))
    blocks = -(-n // (steps * STEP.value))
    groups = -(-blocks // GROUP.value)
    return steps, blocks, groups, torch.empty(groups * (GROUP.value + 1), dtype=torch.int64, device=x.device)


@triton.jit
def _load_values(x, places, full, n):
    """Load values as float32; 0 beyond the last one.

    ``full``: none is beyond, so no mask is needed.
    """
    if full:
        values = tl.load(x + places).to(tl.float32)
    else:
        values = tl.load(x + places, mask=places < n, other=0.0).to(tl.float32)
    return values


@triton.jit
def _sum_of_threads(each, VECTOR: tl.constexpr):
    """Return the sums of every thread for each block; no data moves between threads."""
    rows = tl.reshape(each, [GROUP, SOME * STEP // (WARPS * THREADS * VECTOR), WARPS * THREADS, VECTOR])
    return tl.sum(tl.sum(rows, axis=3), axis=1)


@triton.jit(do_not_specialize=["n", "steps"])
def count_largest_kernel(x, n, threshold, counts, steps):
    """Count, in every block, the magnitudes above the threshold and, 32 bits further up, those equal to it."""
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # 16 bytes
    limit = tl.load(threshold)
    counted = tl.zeros([GROUP, WARPS * THREADS], tl.int32)
    first, end = _group(steps * STEP)
    for start in range(0, steps * STEP, SOME * STEP):
        places = first[:, None] + start + tl.arange(0, SOME * STEP)[None, :]
        magnitude = tl.abs(_load_values(x, places, end <= n, n))
        each = tl.where(magnitude <= limit, tl.where(magnitude < limit, 0, 1 << 16), 1)  # NaN is above
        counted += _sum_of_threads(each, VECTOR)
    aboves, equals = tl.sum(counted & 0xFFFF, axis=1), tl.sum(counted >> 16, axis=1)
    if limit == 0:
        beyond = tl.maximum(first + steps * STEP - tl.maximum(n, first), 0)  # zeros beyond the last value
        equals -= beyond.to(tl.int32)
    if limit == float("inf"):  # NaN counts as infinity
        aboves, equals = tl.zeros([GROUP], tl.int32), equals + aboves
    _store_counts(counts, aboves.to(tl.int64) | equals.to(tl.int64) << 32)


@triton.jit
def _group(size):
    """Return where each block of this program's group begins, and where the last one ends."""
    first = tl.program_id(0).to(tl.int64) * GROUP * size
    return first + tl.arange(0, GROUP) * size, first + GROUP * size


@triton.jit
def _store_counts(counts, each):
    """Store the prefix sum of the counts over a group's blocks; and, after those of all groups, the group's sum."""
    group, groups = tl.program_id(0), tl.num_programs(0)
    tl.store(counts + group * GROUP + tl.arange(0, GROUP), tl.cumsum(each, axis=0))
    tl.store(counts + groups * GROUP + group, tl.sum(each, axis=0))


@triton.jit
def _above(counts):
    return counts.to(tl.int32)


@triton.jit
def _equal(counts):
    return (counts >> 32).to(tl.int32)


@triton.jit
def _before(counts):
    """Return the counts before and in this program's block.

    These are those above the threshold and those equal to it in all blocks before; above it in all blocks; equal to it
    in this block.
    """
    block, groups = tl.program_id(0), tl.cdiv(tl.num_programs(0), GROUP)
    in_group = tl.load(counts + block - 1, mask=block % GROUP > 0, other=0)
    here = _equal(tl.load(counts + block) - in_group)
    above, equal, in_all = _above(in_group).to(tl.int64), _equal(in_group).to(tl.int64), tl.zeros([], tl.int64)
    sums, group = counts + groups * GROUP, tl.arange(0, SUMS)
    for start in range(0, groups, SUMS):
        each = tl.load(sums + start + group, mask=group < groups - start, other=0)
        before = tl.where(group < block // GROUP - start, each, 0)
        above += tl.sum(_above(before), axis=0)
        equal += tl.sum(_equal(before), axis=0)
        in_all += tl.sum(_above(each), axis=0)
    return above, equal, in_all, here


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


@triton.constexpr_function
def column(i):
    """Return the index, in the result of columns_of, of the i-th value of a thread."""
    return int(f"{i:04b}"[::-1], 2)


@triton.constexpr_function
def ones(bits):
    return (1 << bits) - 1


@triton.jit
def _sum_rows(counts):
    """Return the exclusive prefix sum of the counts over the threads, and their total."""
    return tl.cumsum(counts, axis=0) - counts, tl.sum(counts, axis=0)


@triton.jit
def _field(counts, ROW: tl.constexpr, VECTOR: tl.constexpr):
    """Return the count of one row from the packed counts of all rows."""
    WIDTH: tl.constexpr = 64 * VECTOR // EACH
    return ((counts >> (WIDTH * ROW)) & ones(WIDTH)).to(tl.int32)


@triton.jit(do_not_specialize=["n", "kept", "steps"])
def keep_largest_kernel(x, n, wire, threshold, counts, kept, steps, AS_BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """Write a block's values above the threshold, and the first values of the tensor that are equal to it.

    counts: those of count_largest_kernel.
    """
    values = _load_step(x, _begin(steps), n)  # prefetch: they are loaded while counts are summed up
    above, equal, in_all, here = _before(counts)
    missing = kept - in_all  # values equal to the threshold that fill up the count
    place = above + tl.minimum(equal, missing)
    missing -= equal
    limit = tl.load(threshold)
    if (here > 0) & (missing > 0) | (limit == float("inf")):  # NaN counts as infinity
        _keep(x, n, wire, limit, values, place, missing, kept, steps, AS_BITS, ALIGNED, True)
    else:
        _keep(x, n, wire, limit, values, place, missing, kept, steps, AS_BITS, ALIGNED, False)


@triton.jit
def _begin(steps):
    """Return the first place of this program's block."""
    return tl.program_id(0).to(tl.int64) * steps * STEP


@triton.jit
def _load_step(x, start, n):
    return _load_values(x, start + tl.arange(0, STEP), start + STEP <= n, n)


@triton.jit
def _keep(
    x, n, wire, limit, following, place, missing, kept, steps,
    AS_BITS: tl.constexpr, ALIGNED: tl.constexpr, EQUALS: tl.constexpr,
):  # fmt: skip
    """Write the kept values of a block from a place in the wire on.

    EQUALS: ``missing`` values equal to the limit are still needed. following: the values of the first step. Each step
    loads the next values while it writes its own.
    """
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # 16 bytes
    positions = wire + 4 * tl.cast(kept, tl.int64)
    for step in range(steps):
        start = _begin(steps) + step * STEP
        values = following
        if step + 1 < steps:
            following = _load_step(x, start + STEP, n)
        if EQUALS:
            magnitude = plain(values, True)
            equal = (magnitude == limit).to(tl.int32)
            first = (magnitude > limit) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= missing))
            missing -= tl.sum(equal, axis=0)
        else:
            first = ~(tl.abs(values) <= limit)  # NaN too
        taken = first.to(tl.int32)
        place += _store_taken(wire, positions, values, taken, start, place, VECTOR, AS_BITS, ALIGNED)
        if AS_BITS:
            bits = tl.sum(tl.reshape(taken, [BYTES, 8]) << tl.arange(0, 8)[None, :], axis=1)
            byte = start // 8 + tl.arange(0, BYTES)
            tl.store(positions + byte, bits.to(tl.uint8), mask=byte < tl.cdiv(n, 8))


@triton.jit
def _store_taken(
    wire, positions, values, taken, start, place,
    VECTOR: tl.constexpr, AS_BITS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store the taken values without gaps, and their positions if these are not bits; return their number."""
    each, chosen = columns_of(values, VECTOR), columns_of(taken, VECTOR)
    counts = tl.zeros([THREADS], tl.int64)
    for i in tl.static_range(EACH):
        counts += chosen[column(i)].to(tl.int64) << (64 * VECTOR // EACH * (i // VECTOR))
    before, in_all = _sum_rows(counts)
    passed = tl.zeros([], tl.int32)
    for row in tl.static_range(EACH // VECTOR):
        at = passed + _field(before, row, VECTOR)
        for i in tl.static_range(VECTOR):
            mine = chosen[column(row * VECTOR + i)]
            _store_float(wire + 4 * place, at, each[column(row * VECTOR + i)], mine > 0, ALIGNED)
            if not AS_BITS:
                index = (start + (row * THREADS * VECTOR + i) + tl.arange(0, THREADS) * VECTOR).to(tl.int32)
                _store_float(positions + 4 * place, at, index.to(tl.float32, bitcast=True), mine > 0, ALIGNED)
            at += mine
        passed += _field(in_all, row, VECTOR)
    return passed


@triton.jit
def _load_mask(mask, byte, n):
    """Load bytes of the mask; bits beyond the last value are cleared."""
    left = n - byte * 8
    packed = tl.load(mask + byte, mask=left > 0, other=0).to(tl.int32)
    return packed & tl.where(left < 8, (1 << tl.maximum(left, 0).to(tl.int32)) - 1, 255)


@triton.jit
def _count_ones(byte):
    byte -= (byte >> 1) & 0x55
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 15


@triton.jit(do_not_specialize=["n", "kept", "steps"])
def count_bits_kernel(wire, n, kept, counts, steps):
    mask = wire + 4 * tl.cast(kept, tl.int64)
    counted = tl.zeros([GROUP, SOME * BYTES], tl.int32)
    first, end = _group(steps * BYTES)
    for start in range(0, steps * BYTES, SOME * BYTES):
        byte = first[:, None] + start + tl.arange(0, SOME * BYTES)[None, :]
        if end <= n // 8:
            counted += _count_ones(tl.load(mask + byte).to(tl.int32))
        else:
            counted += _count_ones(_load_mask(mask, byte, n))
    _store_counts(counts, tl.sum(counted, axis=1).to(tl.int64))


@triton.jit(do_not_specialize=["n", "kept", "steps"])
def place_by_bits_kernel(wire, out, n, kept, counts, steps, ALIGNED: tl.constexpr):
    """Store the next value where a bit is set, and zero elsewhere and after the last value."""
    VECTOR: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    mask, place = wire + 4 * tl.cast(kept, tl.int64), _before(counts)[0]
    first = tl.arange(0, THREADS) * VECTOR  # the first place of each thread in a row
    for step in range(steps):
        start = _begin(steps) + step * STEP
        bits, each = tl.zeros([THREADS], tl.int32), tl.zeros([THREADS], tl.int64)
        for row in tl.static_range(EACH // VECTOR):
            byte = _load_mask(mask, (start + row * THREADS * VECTOR + first) // 8, n)
            here = (byte >> (first % 8)) & ones(VECTOR)
            bits |= here << (row * VECTOR)
            each += _count_ones(here).to(tl.int64) << (64 * VECTOR // EACH * row)
        before, in_all = _sum_rows(each)
        left = tl.minimum(tl.maximum(kept - place, 0), STEP).to(tl.int32)
        values, passed = _load_placed(wire + 4 * place, bits, before, in_all, left, VECTOR, ALIGNED)
        places = tl.arange(0, STEP)
        if start + STEP <= n:
            tl.store(out + start + places, values.to(out.dtype.element_ty))
        else:
            tl.store(out + start + places, values.to(out.dtype.element_ty), mask=start + places < n)
        place += passed


@triton.jit
def _load_placed(wire, bits, before, in_all, left, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the values of a step, zero where a thread's bit is not set, and their number."""
    found = tl.tuple([])
    for number in tl.static_range(EACH):
        index = _place_of(bits, before, in_all, column(number), VECTOR)
        there = (((bits >> column(number)) & 1) > 0) & (index < left)
        found += tl.tuple([_load_float(wire, index, there, ALIGNED)])
    passed = tl.zeros([], tl.int32)
    for row in tl.static_range(EACH // VECTOR):
        passed += _field(in_all, row, VECTOR)
    return span_of(found, VECTOR), passed


@triton.jit
def _place_of(bits, before, in_all, NUMBER: tl.constexpr, VECTOR: tl.constexpr):
    """Return how many bits of a step precede each thread's value NUMBER."""
    ROW: tl.constexpr = NUMBER // VECTOR
    index = _field(before, ROW, VECTOR) + _count_ones((bits >> (ROW * VECTOR)) & ones(NUMBER % VECTOR))
    for other in tl.static_range(ROW):
        index += _field(in_all, other, VECTOR)
    return index


@triton.jit(do_not_specialize=["n", "kept"])
def place_by_index_kernel(wire, out, n, kept, ALIGNED: tl.constexpr):
    """Scatter values to their positions in a tensor of zeros; positions out of range are ignored."""
    index = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    there = index < kept
    values = _load_float(wire, index, there, ALIGNED)
    positions = _load_float(wire + 4 * tl.cast(kept, tl.int64), index, there, ALIGNED)
    places = positions.to(tl.int32, bitcast=True)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=there & (places >= 0) & (places < n))
