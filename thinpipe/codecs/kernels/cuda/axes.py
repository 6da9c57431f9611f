"""Components of axes to bit planes and back, as thinpipe.codecs.axes has it; a program for some rows of one axis."""

from __future__ import annotations

import triton
import triton.language as tl

STEP = tl.constexpr(128)  # bytes of a plane: of 8 rows each


@triton.jit(do_not_specialize=["rows", "count"])
def encode_planes_kernel(z, gains, bits, starts, limits, planes, rows, count):
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
        values = tl.div_rn(values, tl.load(gains + row, mask=there, other=1.0))
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
    values = tl.load(levels + width * 256 + code) * tl.load(gains + row, mask=there, other=0.0)
    tl.store(z + axis * rows + row, values, mask=there)
