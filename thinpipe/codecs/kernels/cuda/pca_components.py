"""Kernels of PCA transform coding: gains of rows, components to bit planes and back, and moments of rows.

Gains and planes are as in thinpipe.links.learned.transform.
"""

import triton
import triton.language as tl

from thinpipe.codecs.layout import AXES_LEAST_GAIN, AXES_REACH

REACH, LEAST_GAIN = tl.constexpr(AXES_REACH), tl.constexpr(AXES_LEAST_GAIN)
ROWS, AXES = tl.constexpr(32), tl.constexpr(32)  # per program of gains: enough programs, and full cache lines
STEP = tl.constexpr(128)  # bytes of a plane per program, each of 8 rows
MOMENTS, SQUARES = (
    tl.constexpr(2048),
    tl.constexpr(1024),
)  # per program: moments that it updates; squares that it checks at a time


@triton.jit(do_not_specialize=["rows", "count"])
def find_gains_kernel(z, share, gains, rows, count):
    """Compute the gains of some rows, in one pass over all their components."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    squares, largest = tl.zeros([AXES, ROWS], tl.float32), tl.zeros([AXES, ROWS], tl.float32)
    for first in range(0, count, AXES):
        axis = (first + tl.arange(0, AXES)[:, None]).to(tl.int64)
        values = tl.load(z + axis * rows + row[None, :], mask=(axis < count) & (row[None, :] < rows), other=0.0)
        squares += values * values
        largest = tl.maximum(largest, tl.abs(values))
    total = tl.sum(squares, axis=0)
    gain = tl.maximum(tl.sqrt_rn(total) * tl.load(share), tl.div_rn(tl.max(largest, axis=0), REACH))
    gain = tl.where(total == total, tl.maximum(gain, LEAST_GAIN), total)  # NaN is kept
    tl.store(gains + row, gain.to(tl.bfloat16), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "count"])
def encode_planes_kernel(z, gains, bits, starts, limits, planes, rows, count):
    """Encode some rows of one axis to bit planes."""
    piece = tl.cdiv(rows, 8)
    blocks = tl.cdiv(piece, STEP)
    axis = (tl.program_id(0) // blocks).to(tl.int64)
    width, start = tl.load(bits + axis).to(tl.int32), tl.load(starts + axis)
    if width > 0:
        byte = tl.program_id(0) % blocks * STEP + tl.arange(0, STEP)[None, :]
        part = tl.arange(0, 8)[:, None]
        row = part * piece + byte
        there = (byte < piece) & (row < rows)
        values = tl.load(z + axis * rows + row, mask=there, other=0.0)
        values = tl.div_rn(values, tl.load(gains + row, mask=there, other=1.0).to(tl.float32))
        code = tl.zeros([8, STEP], tl.int32)
        for halving in tl.static_range(7, -1, -1):
            if halving < width:
                limit = tl.load(limits + width * 255 + code + ((1 << halving) - 1))
                code += tl.where(values >= limit, 1 << halving, 0)
        code = tl.where(there, code, 0)
        for bit in tl.static_range(0, 8):
            if (bit < width) & (start + bit < count):
                packed = tl.sum(((code >> bit) & 1) << part, axis=0)[None, :]
                tl.store(planes + (start + bit) * piece + byte, packed.to(tl.uint8), mask=byte < piece)


@triton.jit(do_not_specialize=["rows", "count"])
def decode_planes_kernel(planes, gains, bits, starts, levels, z, rows, count):
    piece = tl.cdiv(rows, 8)
    blocks = tl.cdiv(piece, STEP)
    axis = (tl.program_id(0) // blocks).to(tl.int64)
    width, start = tl.load(bits + axis).to(tl.int32), tl.load(starts + axis)
    byte = tl.program_id(0) % blocks * STEP + tl.arange(0, STEP)[None, :]
    part = tl.arange(0, 8)[:, None]
    row = part * piece + byte
    there = (byte < piece) & (row < rows)
    code = tl.zeros([8, STEP], tl.int32)
    for bit in tl.static_range(0, 8):
        if (bit < width) & (start + bit < count):
            packed = tl.load(planes + (start + bit) * piece + byte, mask=byte < piece, other=0).to(tl.int32)
            code |= ((packed >> part) & 1) << bit
    values = tl.load(levels + width * 256 + code) * tl.load(gains + row, mask=there, other=0.0).to(tl.float32)
    tl.store(z + axis * rows + row, values, mask=there)


@triton.jit(do_not_specialize=["size", "total", "seen"])
def fold_moments_kernel(step, before, weight, moments, new_weight, size, total, seen, RATE: tl.constexpr):
    """Update some moments by an exponential moving average, if all moments of the step are finite.

    Every program checks that itself, from the squares alone: a value that is not finite shows in a square.
    """
    odd = tl.zeros([SQUARES], tl.float32)
    for first in range(0, total // (size + 1), SQUARES):
        axis = first + tl.arange(0, SQUARES)
        square = axis // size * size * size + axis % size * (size + 1)
        odd += tl.load(step + square, mask=axis < total // (size + 1), other=0.0) * 0.0
    finite = tl.sum(odd, axis=0) == 0.0
    place = tl.program_id(0) * MOMENTS + tl.arange(0, MOMENTS)
    held = tl.load(before + place, mask=place < total, other=0.0)
    found = tl.load(step + place, mask=place < total, other=0.0) / seen
    tl.store(moments + place, tl.where(finite, held + RATE * (found - held), held), mask=place < total)
    if tl.program_id(0) == 0:
        so_far = tl.load(weight)
        tl.store(new_weight, tl.where(finite, so_far * (1 - RATE) + RATE, so_far))
