"""Kernels of gauss:B+coded: rotated blocks in a variant of the Golomb-Rice code, as in thinpipe.codecs.golomb_rice.

A program is one warp with one block, so that all of its threads have the same form. Blocks are rotated twice, for their
energies and for their codes: to store them would take as much memory as the tensor. In between, one program computes
the limit that determines the sizes, from the histogram of energies.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinpipe.codecs import golomb_rice
from thinpipe.codecs.kernels.cuda.device import greater
from thinpipe.codecs.kernels.cuda.rotated_blocks import (
    ALIGN,
    HUGE,
    INFINITY,
    LEAST,
    ONE,
    RUNS,
    change_signs,
    header_size,
    load_seed,
    means_at,
    nearest_bfloat16,
    store_seed,
)
from thinpipe.codecs.kernels.cuda.tiles import butterflies, load_16_bits, spread, store_16_bits
from thinpipe.codecs.layout import GAUSS_ENERGY

TILE = tl.constexpr(golomb_rice.CODED_BLOCK)
ENERGY = tl.constexpr(GAUSS_ENERGY)
PIECE = tl.constexpr(golomb_rice.CODED_BLOCK // 8)
MOST_PLANES = tl.constexpr(max(form.planes for form in golomb_rice.forms().values()))
MOST_STEPS = tl.constexpr(golomb_rice.MOST_STEPS)
GROWTH = tl.constexpr(golomb_rice.GROWTH)
TURNS = tl.constexpr(golomb_rice.TURNS)
LOWEST = tl.constexpr(golomb_rice.LIMITS[0])
SMALLEST = tl.constexpr(min(golomb_rice.forms()))
LAST = tl.constexpr(len(golomb_rice.sizes_by_energy()) - 1)
TRIED = tl.constexpr(64)  # limits tried at once, 1024 apart, then 32, then 1; also the most sizes there may be
CHUNK = tl.constexpr(4096)  # energies per step of the prefix sum
ENERGIES = tl.constexpr(triton.cdiv(golomb_rice.HIGHEST_ENERGY + golomb_rice.TURNS, CHUNK.value) * CHUNK.value)
SIZES = tl.constexpr(1024)  # per program
COLUMNS = tl.constexpr(4)  # of the table of forms
GROUPS = tl.constexpr(golomb_rice.CODED_BLOCK // 8)  # of 8 neighbouring values of a block, one per thread
LANES = tl.constexpr(0x0101010101010101)
PACK = tl.constexpr(0x0102040810204080)  # the product with 8 bytes of one bit each has these bits in its highest byte


@cache
def forms_on(device: torch.device) -> Tensor:
    """Return the table of forms by size: low, high, rest and the bit pattern of the step."""
    numbers, steps = golomb_rice.form_table(device)
    return torch.cat([numbers, steps.view(torch.int32)[:, None]], 1)


@cache
def masked_on(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tables: bits gathered and scattered by a mask, at 256 * mask + bits; and a byte for each bit."""
    mask, bits = torch.arange(256)[:, None], torch.arange(256)[None, :]
    gathered, scattered, rank = (
        torch.zeros(256, 256, dtype=torch.int64),
        torch.zeros(256, 256, dtype=torch.int64),
        0 * mask,
    )
    for place in range(8):
        one = (mask >> place) & 1
        gathered |= one * ((bits >> place) & 1) << rank
        scattered |= one * ((bits >> rank) & 1) << place
        rank = rank + one
    spread = sum(((torch.arange(256) >> place) & 1) << (8 * place) for place in range(8))
    assert isinstance(spread, Tensor)
    return gathered.byte().flatten().to(device), scattered.byte().flatten().to(device), spread.to(device)


@cache
def rises_on(device: torch.device) -> Tensor:
    """Return the increases of the size above the smallest one, in two rows.

    First the energies above the limit at which they begin, then the additional units of 32 bits.
    """
    by_energy, sizes = golomb_rice.sizes_by_energy(), list(golomb_rice.forms())
    rises = torch.zeros(2, TRIED.value, dtype=torch.int32)
    rises[0, : len(sizes) - 1] = torch.tensor([by_energy.index(size) for size in sizes[1:]])
    rises[1, : len(sizes) - 1] = torch.tensor(sizes).diff()
    return rises.to(device)


@triton.jit
def _rotated(x, n, means, channels, length, seed, FORM: tl.constexpr):
    """Rotate a program's block.

    Returns its components, the largest magnitude, whether the block has a scale, the power of two below that magnitude,
    and the sum of squares.
    """
    start = tl.program_id(0).to(tl.int64) * TILE
    place = start + tl.arange(0, TILE)
    there = place < n
    values = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    values = tl.where(there, values - means_at(means, start, channels, length, TILE, TILE, FORM), 0.0)
    values = butterflies(change_signs(values, start, seed, TILE, TILE), TILE, TILE)
    largest = tl.reduce(tl.abs(values), 0, greater)
    usual = (largest < HUGE) & (largest >= LEAST)
    values = tl.where(usual, values, 0.0)
    power = tl.where(usual, largest.to(tl.int32, bitcast=True) & INFINITY, ONE)
    components = values * (_inverse_of(power) * 256.0)
    return values, largest, usual, power, tl.sum((components * components).to(tl.int32), axis=0)


@triton.jit
def _inverse_of(power):
    return (0x7F000000 - power).to(tl.float32, bitcast=True)  # the biased exponents of both sum to 254


@triton.jit(do_not_specialize=["n", "channels", "length", "seed"])
def energies_kernel(x, n, means, energies, counts, channels, length, seed, FORM: tl.constexpr):
    """Compute the energy of every block, with its index modulo TURNS to break ties, and the histogram of energies."""
    _, _, usual, power, squares = _rotated(x, n, means, channels, length, seed, FORM)
    energy = (squares.to(tl.float32).to(tl.int32, bitcast=True) >> ENERGY) + (power >> (ENERGY - 1))
    energy = tl.where(usual, energy, 0) + tl.program_id(0) % TURNS
    tl.store(energies + tl.program_id(0), energy)
    tl.atomic_add(counts + energy, 1, sem="relaxed")


@triton.jit(do_not_specialize=["blocks", "budget"])
def limit_kernel(counts, rises, limit, blocks, budget):
    """Find the smallest limit with which all blocks fit; one program replaces ``counts`` by their prefix sum.

    ``rises``: for each size above the smallest, the energy above the limit at which it begins, and its additional units
    of 32 bits.
    """
    below = 0
    for start in tl.static_range(0, ENERGIES, CHUNK):
        place = counts + start + tl.arange(0, CHUNK)
        up_to = below + tl.cumsum(tl.load(place), 0)
        tl.store(place, up_to)
        below = tl.max(up_to, axis=0)
    tl.debug_barrier()  # counts that some threads stored above, others load below
    size = tl.arange(0, TRIED)
    begin = tl.load(rises + size)[None, :]
    more = tl.load(rises + TRIED + size)[None, :]
    spare = budget - SMALLEST * tl.cast(blocks, tl.int64)
    low = tl.full([], LOWEST, tl.int32)
    for turn in tl.static_range(3):
        gap = 1024 >> (5 * turn)
        last = (low + gap * (size + 1))[:, None] + begin - 1  # the highest energy of a smaller size
        smaller = tl.where(last < 0, 0, tl.load(counts + tl.minimum(tl.maximum(last, 0), ENERGIES - 1)))
        taken = tl.sum((blocks - smaller).to(tl.int64) * more, axis=1)
        low += gap * tl.sum((taken > spare).to(tl.int32), axis=0)
    tl.store(limit, low + 1)


@triton.jit(do_not_specialize=["blocks"])
def sizes_kernel(energies, limit, table, sizes, blocks):
    index = tl.program_id(0) * SIZES + tl.arange(0, SIZES)
    there = index < blocks
    above = tl.load(energies + index, mask=there, other=0) - tl.load(limit)
    tl.store(sizes + index, tl.load(table + tl.minimum(tl.maximum(above, 0), LAST)).to(tl.int32), mask=there)


@triton.jit
def _form(forms, size):
    row = forms + size * COLUMNS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3).to(tl.float32, bitcast=True)


@triton.jit
def _magnitudes(values, inverse, step, low, high, most):
    """Return magnitudes in low steps, the ones in each unary code (negative: no code), and the bits of all codes."""
    factor = inverse * tl.div_rn(0.0 * step + 1.0, step) * (1 << low).to(tl.float32)
    magnitudes = tl.minimum((tl.abs(values) * factor).to(tl.int32), most)
    more = (magnitudes >> low) - ((1 << high) - 1)
    return magnitudes, more, tl.sum(tl.maximum(more + 1, 0), axis=0)


@triton.jit
def _ones_of(mask):
    """Return the number of ones of masks of 8 bits."""
    pairs = mask - ((mask >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 15


@triton.jit
def _above(numbers, limit):
    """Return a mask of 8 bits: which bytes of 64-bit words, all below 128, are above a limit."""
    flags = ((numbers + tl.full([], LANES, tl.int64) * (127 - limit)) >> 7) & LANES
    return ((flags * PACK) >> 56).to(tl.int32) & 255


@triton.jit
def _store_rest(wire, more, rest, gathered):
    """Store the unary codes of all n >= 0 in ``more``, n ones and a zero each, interleaved: first bits first.

    8 neighbouring values are one mask. In every turn the bits to write are the mask of the values with a one, gathered
    at the ones of the mask of those with a bit. The unused end of the rest must be zero already.
    """
    bits = tl.reshape(tl.maximum(more + 1, 0), [GROUPS, 8]).to(tl.int64)
    numbers = spread(tl.sum(bits << (8 * tl.arange(0, 8)).to(tl.int64)[None, :], axis=1), GROUPS)
    word, unfinished, written = 0, 0, 0
    turns = tl.where(rest > 0, tl.max(more, axis=0) + 1, 0)
    present = _above(numbers, 0)
    for turn in range(turns):
        following = _above(numbers, turn + 1)
        ones = tl.load(gathered + (present << 8) + following).to(tl.int32)
        count = _ones_of(present)
        place = written + tl.cumsum(count, 0) - count
        written += tl.sum(count, axis=0)
        while word < written >> 5:
            _store_32_bits(wire, word, unfinished | _bits_in(ones, place - 32 * word))
            word += 1
            unfinished = 0
        unfinished |= _bits_in(ones, place - 32 * word)
        present = following
    if word < rest:
        _store_32_bits(wire, word, unfinished)


@triton.jit
def _bits_in(bits, place):
    """Return a word of 32 bits with up to 8 bits of each group at its place; those outside are left out."""
    left, right = tl.minimum(tl.maximum(place, 0), 31), tl.minimum(tl.maximum(-place, 0), 31)
    return tl.sum(tl.where(place < 32, (bits << left) >> right, 0), axis=0)


@triton.jit
def _store_32_bits(wire, index, bits):
    """Store 32 bits byte by byte, because a wire may start anywhere."""
    byte = tl.arange(0, 4)
    tl.store(wire + 4 * index + byte, ((bits >> (8 * byte)) & 255).to(tl.uint8))


@triton.jit(do_not_specialize=["n", "channels", "length", "seed"])
def encode_coded_kernel(x, n, wire, means, sizes, starts, forms, gathered, channels, length, seed, FORM: tl.constexpr):
    """Encode one block per program.

    The wire after the means must hold zeros: the gaps between the parts of blocks are not written.
    """
    values, largest, usual, power, squares = _rotated(x, n, means, channels, length, seed, FORM)
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    size = tl.load(sizes + block)
    low, high, rest, step = _form(forms, size)
    inverse = _inverse_of(power)
    step *= tl.sqrt_rn(squares.to(tl.float32) * (2.0**-16 / TILE))
    step = tl.where(rest > 0, tl.maximum(step, largest * inverse * (1 / MOST_STEPS)), step)
    step = tl.where(usual, step, 1.0)
    most = (tl.where(rest > 0, MOST_STEPS, 1) << low) - 1
    magnitudes, more, needed = _magnitudes(values, inverse, step, low, high, most)
    while (rest > 0) & (needed > 32 * rest):
        step *= GROWTH
        magnitudes, more, needed = _magnitudes(values, inverse, step, low, high, most)
    half_step = tl.div_rn(step, (2 << low).to(tl.float32))
    if FORM > RUNS:
        components = tl.abs(values * (inverse * 256.0))
        products = tl.sum((components * (2 * magnitudes + 1).to(tl.float32)).to(tl.int32), axis=0)
        half_step = tl.div_rn(squares.to(tl.float32), tl.maximum(products, 1).to(tl.float32)) * 2.0**-8
    half_step = nearest_bfloat16(half_step).to(tl.float32, bitcast=True)
    scale = tl.where(usual, half_step * (1.0 / TILE) * power.to(tl.float32, bitcast=True), 0.0)
    scale = tl.where(largest < HUGE, scale, float("nan"))
    store_16_bits(wire + 2 * channels, block, scale.to(tl.int32, bitcast=True) >> 16, block < blocks)
    sizes_section = wire + header_size(channels, blocks)
    tl.store(sizes_section + block, size.to(tl.uint8))
    if block == 0:
        store_seed(wire, channels, blocks, seed)
    payload = sizes_section + _padded(blocks) + 4 * tl.load(starts + block)
    codes = tl.where(more > 0, magnitudes - (more << low), magnitudes) + tl.where(values < 0, 1 << (low + high), 0)
    pieces = tl.reshape(codes, [8, PIECE])
    for bit in tl.static_range(MOST_PLANES):
        if bit <= low + high:
            packed = tl.sum(((pieces >> bit) & 1) << tl.arange(0, 8)[:, None], axis=0)
            tl.store(payload + bit * PIECE + tl.arange(0, PIECE), packed.to(tl.uint8))
    _store_rest(payload + (low + high + 1) * PIECE, more, rest, gathered)


@triton.jit
def _padded(blocks):
    return (blocks + (ALIGN - 1)) // ALIGN * ALIGN


@triton.jit
def _load_rest(wire, end, present, scattered, bytes_of):
    """Decode the unary codes of the values in the masks ``present``: the inverse of _store_rest, a byte for each value.

    Places from ``end`` on, in bits, read as zeros.
    """
    more, read, turn = tl.zeros([GROUPS], tl.int64), 0, 0
    count = _ones_of(present)
    total = tl.sum(count, axis=0)
    while (total > 0) & (turn < MOST_STEPS):
        place = read + tl.cumsum(count, 0) - count
        byte = place >> 3
        bits = tl.load(wire + byte, mask=(count > 0) & (place < end), other=0).to(tl.int32)
        bits |= tl.load(wire + byte + 1, mask=(count > 0) & (8 * byte + 8 < end), other=0).to(tl.int32) << 8
        bits = (bits >> (place & 7)) & ((1 << tl.minimum(tl.maximum(end - place, 0), 8)) - 1)
        present = tl.load(scattered + (present << 8) + bits).to(tl.int32)
        more += tl.load(bytes_of + present)
        read += total
        count = _ones_of(present)
        total = tl.sum(count, axis=0)
        turn += 1
    return more


@triton.jit
def _values_with_rest(payload, capacity, low, high, rest):
    """Return masks of 8 neighbouring values whose high bits are all ones, if the block has a rest."""
    group = tl.arange(0, GROUPS)[:, None]
    bit = tl.arange(0, 8)[None, :]
    at = 8 * (group % (PIECE // 8)) + bit
    piece = group // (PIECE // 8)
    first, last = low * PIECE + at, (low + high - 1) * PIECE + at
    ones = tl.load(payload + first, mask=(rest > 0) & (first < capacity), other=0)
    ones &= tl.load(payload + last, mask=(rest > 0) & (last < capacity), other=0)
    return tl.sum(((ones.to(tl.int32) >> piece) & 1) << bit, axis=1)


@triton.jit(do_not_specialize=["n", "budget", "channels", "length"])
def decode_coded_kernel(
    wire, out, n, means, sizes, starts, forms, scattered, bytes_of, budget, channels, length, FORM: tl.constexpr
):
    """Decode one block per program: the inverse of encode_coded_kernel.

    On a damaged wire blocks may reach beyond its end, where it reads as zeros.
    """
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    low, high, rest, _ = _form(forms, tl.load(sizes + block))
    first = 4 * tl.load(starts + block)
    capacity = 4 * tl.cast(budget, tl.int64) - first
    payload = wire + header_size(channels, blocks) + _padded(blocks) + first
    at = tl.arange(0, PIECE)[None, :]
    pieces = tl.zeros([8, PIECE], tl.int32)
    for bit in tl.static_range(MOST_PLANES):
        if bit <= low + high:
            plane = tl.load(payload + bit * PIECE + at, mask=bit * PIECE + at < capacity, other=0).to(tl.int32)
            pieces |= ((plane >> tl.arange(0, 8)[:, None]) & 1) << bit
    codes = tl.reshape(pieces, [TILE])
    negative, magnitudes = codes >> (low + high), codes & ((1 << (low + high)) - 1)
    behind = (low + high + 1) * PIECE
    present = _values_with_rest(payload, capacity, low, high, rest)
    end = tl.minimum(32 * rest, tl.maximum(8 * (capacity - behind), 0)).to(tl.int32)
    more = _load_rest(payload + behind, end, present, scattered, bytes_of)
    added = (more[:, None] >> (8 * tl.arange(0, 8)).to(tl.int64)[None, :]).to(tl.int32) & 255
    magnitudes += tl.reshape(added, [TILE]) << low
    scale = (load_16_bits(wire + 2 * channels, block, block < blocks) << 16).to(tl.float32, bitcast=True)
    rows = (2 * magnitudes + 1).to(tl.float32) * tl.where(negative > 0, -scale, scale)
    start = block * TILE
    values = change_signs(butterflies(rows, TILE, TILE), start, load_seed(wire, channels, blocks), TILE, TILE)
    values += means_at(means, start, channels, length, TILE, TILE, FORM)
    place = start + tl.arange(0, TILE)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=place < n)
