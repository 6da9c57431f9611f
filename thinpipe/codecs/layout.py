"""The wire layout, a header and codes packed in bit planes, and the constants and formulas that all kernels share.

Codes are packed so that neither a SIMD unit nor a GPU thread ever shifts across lanes. A block holds 2048 codes in
8 pieces of 256. A code of b bits is cut into parts of 8, 4, 2 and 1 bits (12 = 8+4, 7 = 4+2+1, 16 = 8+8), lowest
bits first, and each part of the entire block is a plane of w rows of 256 bytes, where w is the part's width: row g
holds the parts of pieces g, g+w, g+2w ..., each shifted by w bits more than the last.

Example with 4 bits and pieces of 1: the codes 1 2 3 4 5 6 7 8 become w = 4 rows of one byte, 0x51 0x62 0x73 0x84. The
last block of a tensor has shorter pieces: its m codes fill 8 pieces of ceil(m / 8), missing codes are 0.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

PIECES = 8
PIECE = 256
BLOCK = PIECES * PIECE

# Tiles (thinpipe.codecs.tile). A tile whose values reach HUGE is computed in units of 1/UNIT, so that no difference of
# two values overflows. A step is a normal float, so that its reciprocal is finite and hardware that flushes subnormals
# to zero agrees with the rest.
TILE_HUGE = 2.0**112
TILE_UNIT = 2.0**-12
TILE_LEAST_STEP = 2.0**-126
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max

# Rotated blocks (thinpipe.codecs.gauss). A block below LEAST counts as zeros, one that reaches HUGE as not finite:
# between them no operation on a block leaves the range of normal floats.
GAUSS_LEAST = 2.0**-100
GAUSS_HUGE = 2.0**126
GAUSS_BY_LARGEST = 4  # bits from which a block's scale follows from its largest component
GAUSS_ENERGY = 18  # low bits of a float32 that an energy drops: 32 energy units are a factor of two
GAUSS_SEED = 2  # 16-bit fields of the header that hold the seed of the signs
# Constants of the hash from seed, block index and position in the block to a sign: see gauss_signs.
GAUSS_BLOCK, GAUSS_PLACE, GAUSS_MIX = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
# Number of samples in the mean of a channel, and of strands (partial sums) in which they are added up.
GAUSS_SAMPLES = 512
GAUSS_STRANDS = 64

# A row's gain is raised until its largest component is at most this many standard deviations. On hidden states of a
# language model 4.5 had 1.5 times the squared error at 4 bits; 3 had 1 % less at 4 bits and 1 % more at 2 bits.
AXES_REACH = 3.5
AXES_LEAST_GAIN = 1e-30  # the gain of a row that equals the mean

HEADER_ALIGN = 16  # codes start at a multiple of this, so that a GPU can load and store 16 bytes at a time


def header_bytes(values: int, size: int = 4) -> int:
    """Return the padded bytes of a header of ``values`` values of ``size`` bytes each."""
    return -(-size * values // HEADER_ALIGN) * HEADER_ALIGN


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of ``count`` packed codes: count * bits / 8, with count rounded up to a multiple of 8."""
    return -(-count // PIECES) * bits


def planes(bits: int) -> list[tuple[int, int]]:
    """Return the parts of a code as (width, shift): planes(12) == [(8, 0), (4, 8)]."""
    parts = []
    shift = 0
    while shift < bits:
        width = next(w for w in (8, 4, 2, 1) if shift + w <= bits)
        parts.append((width, shift))
        shift += width
    return parts


def pack(codes: Tensor, out: Tensor, bits: int) -> None:
    """Pack integer codes, in plain torch: the reference for the other kernels."""
    count = codes.numel()
    full = count - count % BLOCK
    for start, stop in ((0, full), (full, count)):
        if start == stop:
            continue
        piece = PIECE if stop == full else -(-(stop - start) // PIECES)
        missing = -(stop - start) % (PIECES * piece)
        blocks = torch.nn.functional.pad(codes[start:stop], (0, missing))
        rows = []
        for width, shift in planes(bits):
            parts = ((blocks >> shift) & ((1 << width) - 1)).view(-1, PIECES // width, width, piece)
            shifts = width * torch.arange(PIECES // width, device=codes.device)
            rows.append((parts << shifts[:, None, None]).sum(1).to(torch.uint8))
        out[packed_bytes(start, bits) : packed_bytes(stop, bits)].copy_(torch.cat(rows, 1).reshape(-1))


def unpack(wire: Tensor, count: int, bits: int) -> Tensor:
    """Unpack ``count`` codes as int64: the inverse of ``pack``."""
    full = count - count % BLOCK
    codes = torch.empty(count, dtype=torch.int64, device=wire.device)
    for start, stop in ((0, full), (full, count)):
        if start == stop:
            continue
        piece = PIECE if stop == full else -(-(stop - start) // PIECES)
        rows = wire[packed_bytes(start, bits) : packed_bytes(stop, bits)].view(-1, bits, piece).long()
        blocks = torch.zeros(rows.shape[0], PIECES * piece, dtype=torch.int64, device=wire.device)
        first = 0
        for width, shift in planes(bits):
            shifts = width * torch.arange(PIECES // width, device=wire.device)
            parts = (rows[:, None, first : first + width] >> shifts[None, :, None, None]) & ((1 << width) - 1)
            blocks |= parts.reshape(rows.shape[0], -1) << shift
            first += width
        codes[start:stop] = blocks.reshape(-1)[: stop - start]
    return codes


def write_header(wire: Tensor, values: Tensor) -> None:
    """Write float32 values to the start of a wire; the padding becomes zero."""
    data = values.to(torch.float32).reshape(-1).contiguous().view(torch.uint8)
    wire[: data.numel()].copy_(data)
    wire[data.numel() : header_bytes(values.numel())].zero_()


def write_poisoned(wire: Tensor, floats: int) -> None:
    """Write the wire of a tensor with NaN or infinity: it decodes to NaN everywhere, so overflow checks detect it."""
    wire.zero_()
    write_header(wire, torch.full((floats,), torch.nan, device=wire.device))


def read_header(wire: Tensor, floats: int) -> Tensor:
    """Return a copy of the float32 values at the start of a wire: a wire inside another buffer may be unaligned."""
    return wire[: 4 * floats].clone().view(torch.float32)


def bucket_bounds(count: int, buckets: int) -> list[tuple[int, int]]:
    """Return the bounds of torch.tensor_split: the first count % buckets buckets have one value more."""
    small, larger = divmod(count, buckets)
    return list(pairwise(i * small + min(i, larger) for i in range(buckets + 1)))


def bucket_affine(lo: Tensor, hi: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 (p, offset, scale) per bucket; every machine computes level = round((x*p - offset)*scale).

    p is a power of two, so x*p is exact: it keeps x - lo from overflowing where a bucket spans more than half of
    float32, and the scale from overflowing where the span is tiny. It is 1 for every ordinary bucket.
    """
    lo, hi = lo.double(), hi.double()
    span = hi - lo
    p = torch.ones_like(span)
    p[span > 2.0**126] = 2.0**-3
    p[(span > 0) & (span < 2.0**-96)] = 2.0**100  # |x| < 2^-72 here, or the span would be below x's own rounding
    scale = torch.where(span > 0, levels / (span * p), torch.zeros_like(span))
    return p.float(), (lo * p).float(), scale.float()


def move_to_zero(lo: Tensor, hi: Tensor, level_bits: int) -> tuple[Tensor, Tensor]:
    """Return the ends of buckets, moved so that the bucket with values of both signs has a level of exactly zero.

    The step is rounded up to so few significant bits that every multiple of it is a float32: lo = -k * step and
    hi = (levels - k) * step are then exact, and so is the value of level k. No value is further from a level than half
    a step, though values may lie beyond the ends by that much. With 2 level bits -2.9 .. 3 becomes a step of
    59 / 30, rounded up, and 1 level below zero: -1.97 .. 3.93. Ends that would overflow float32 are not moved.
    """
    levels = (1 << level_bits) - 1
    low, high = lo.double(), hi.double()
    step = (high - low) / levels
    exponent = torch.frexp(step).exponent - (24 - level_bits)
    unit = torch.ldexp(torch.ones_like(step), exponent.clamp(min=-149))  # no float32 is finer than 2^-149
    step = torch.ceil(step / unit) * unit
    # 0.499, not 0.5: rounding must not put the least value at level -1.
    below = torch.ceil(-low / step - 0.499)
    moved_lo, moved_hi = (-below * step).float(), ((levels - below) * step).float()
    moves = (low < 0) & (high > 0) & moved_lo.isfinite() & moved_hi.isfinite()
    return torch.where(moves, moved_lo, lo), torch.where(moves, moved_hi, hi)


def bucket_values(lo: Tensor, hi: Tensor, level_bits: int) -> Tensor:
    """Return the float32 value of every code: lo + level * (hi - lo) / levels, exact for lo and hi.

    Multiplies before it divides: with the steps of few significant bits that ``move_to_zero`` makes, the result is then
    exact; dividing first would give about 1e-17 in place of zero.
    """
    levels = (1 << level_bits) - 1
    low, high = lo.double()[:, None], hi.double()[:, None]
    level = torch.arange(levels + 1, dtype=torch.float64, device=lo.device)
    values = low + (high - low) * level / levels
    values[:, -1:] = high
    return values.float().reshape(-1)


def midpoints(codebook: Tensor) -> Tensor:
    """Return the float32 midpoints of ascending codebook values; a value at a midpoint belongs to the lower side."""
    codebook = codebook.double()
    return ((codebook[1:] + codebook[:-1]) / 2).float()


def with_zero(codebook: Tensor) -> Tensor:
    """Return an ascending codebook with zero in place of a duplicate value, else of the value nearest zero."""
    repeats = (codebook[1:] == codebook[:-1]).nonzero()
    codebook = codebook.clone()
    codebook[repeats[0, 0] if len(repeats) else codebook.abs().argmin()] = 0
    return codebook.sort().values


def positions_are_bits(count: int, kept: int) -> bool:
    """Return True if one bit per value is smaller than an int32 per kept value, for the positions of kept values."""
    return -(-count // 8) <= 4 * kept


def gauss_reach(tile: int) -> float:
    """Return the ratio of a block's scale to its largest component: about 1 / (1.6 + log2(tile) / 5), a float32.

    Found empirically on normal values: the largest component lies there on average, and a little above from 5 bits on.
    """
    return round(2**16 / (1.6 + 0.2 * (tile.bit_length() - 1))) / 2**16


def gauss_signs(blocks: int, tile: int, seed: int = 0) -> Tensor:
    """Return the pseudorandom signs that blocks are multiplied by before the Hadamard transform, one block per row.

    They differ for each block and each message. Gradients of many samples, and of consecutive steps, have much in
    common; with fixed signs so would their errors, which would not average out: training from scratch then fails.
    """
    block, place = torch.arange(blocks)[:, None] + seed, torch.arange(tile)
    mixed = block * GAUSS_BLOCK + place * GAUSS_PLACE & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * GAUSS_MIX & 0xFFFFFFFF
    return (1 - 2 * (mixed >> 31)).float()
