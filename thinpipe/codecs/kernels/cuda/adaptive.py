"""Rotated blocks to bit planes and back, each block with bits of its own, as thinpipe.codecs.adaptive has it.

A program is one warp with one block: how many bits it has is one number for all of it. Blocks are rotated twice, for
their energies and for their codes: to keep them would take as much memory as the tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import greater
from thinpipe.codecs.kernels.cuda.gauss import (
    ALIGN,
    BY_LARGEST,
    HUGE,
    INFINITY,
    LEAST,
    ONE,
    RUNS,
    change_signs,
    header_size,
    means_at,
    nearest_bfloat16,
    reach_of,
    tell_seed,
    told_seed,
)
from thinpipe.codecs.kernels.cuda.tiles import butterflies, load_words, store_words
from thinpipe.codecs.layout import GAUSS_ENERGY
from thinpipe.codecs.normal import MAX_BITS

ENERGY = tl.constexpr(GAUSS_ENERGY)
MOST = tl.constexpr(MAX_BITS)
HALF = tl.constexpr(1 << (MAX_BITS - 1))  # boundaries in a row of the tables; twice as many levels follow
ROW = tl.constexpr(3 << (MAX_BITS - 1))


@triton.jit
def _rotated(x, n, means, channels, length, seed, TILE: tl.constexpr, FORM: tl.constexpr):
    """A program's block, its largest component, whether it has a scale; the power of two below, and the squares."""
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
    return (0x7F000000 - power).to(tl.float32, bitcast=True)  # the exponents of both are 254 together


@triton.jit(do_not_specialize=["n", "channels", "length", "seed"])
def energies_kernel(x, n, means, energies, channels, length, seed, TILE: tl.constexpr, FORM: tl.constexpr):
    _, _, usual, power, squares = _rotated(x, n, means, channels, length, seed, TILE, FORM)
    energy = (squares.to(tl.float32).to(tl.int32, bitcast=True) >> ENERGY) + (power >> (ENERGY - 1))
    tl.store(energies + tl.program_id(0), tl.where(usual, energy, 0))


@triton.jit(do_not_specialize=["n", "channels", "length", "seed"])
def encode_adaptive_kernel(
    x, n, wire, means, bits, starts, tables, channels, length, seed, TILE: tl.constexpr, FORM: tl.constexpr
):
    values, largest, usual, power, squares = _rotated(x, n, means, channels, length, seed, TILE, FORM)
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    width = tl.load(bits + block).to(tl.int32)
    inverse = _inverse_of(power)
    if width >= BY_LARGEST:
        s = largest * inverse * reach_of(TILE)
    else:
        s = tl.sqrt_rn(squares.to(tl.float32) * (2.0**-16 / TILE))
    s = tl.where(usual, nearest_bfloat16(s).to(tl.float32, bitcast=True), 1.0)
    sizes = tl.abs(values * (inverse * tl.div_rn(0.0 * s + 1.0, s)))
    code = tl.zeros([TILE], tl.int32)
    for halving in tl.static_range(MOST - 2, -1, -1):
        if halving < width - 1:
            limit = tl.load(tables + width * ROW + code + ((1 << halving) - 1))
            code += tl.where(sizes > limit, 1 << halving, 0)
    if FORM > RUNS:
        chosen = tl.load(tables + width * ROW + HALF + code) * 256.0
        products = tl.sum((tl.abs(values * (inverse * 256.0)) * chosen).to(tl.uint32), axis=0)
        s = tl.div_rn(squares.to(tl.float32), tl.maximum(products.to(tl.float32), 1.0))
        s = tl.where(usual, nearest_bfloat16(s).to(tl.float32, bitcast=True), 1.0)
    scale = tl.where(usual, s * (1.0 / TILE) * power.to(tl.float32, bitcast=True), 0.0)
    scale = tl.where(largest < HUGE, scale, float("nan"))
    store_words(wire + 2 * channels, block, scale.to(tl.int32, bitcast=True) >> 16, block < blocks)
    code += tl.where(values < 0, 1 << (width - 1), 0)
    told = wire + header_size(channels, blocks)
    tl.store(told + block, width.to(tl.uint8))
    if block == 0:
        tell_seed(wire, channels, blocks, seed)
        at = blocks + tl.arange(0, ALIGN)
        tl.store(told + at, tl.zeros([ALIGN], tl.uint8), mask=at < _padded(blocks))
    PIECE: tl.constexpr = TILE // 8
    plane = told + _padded(blocks) + tl.load(starts + block) * PIECE + tl.arange(0, PIECE)
    pieces = tl.reshape(code, [8, PIECE])
    for bit in tl.static_range(MOST):
        if bit < width:
            packed = tl.sum(((pieces >> bit) & 1) << tl.arange(0, 8)[:, None], axis=0)
            tl.store(plane + bit * PIECE, packed.to(tl.uint8))


@triton.jit
def _padded(blocks):
    return (blocks + (ALIGN - 1)) // ALIGN * ALIGN


@triton.jit(do_not_specialize=["n", "planes", "channels", "length"])
def decode_adaptive_kernel(
    wire, out, n, means, bits, starts, tables, planes, channels, length, TILE: tl.constexpr, FORM: tl.constexpr
):
    """The inverse of encode_adaptive_kernel."""
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    width, first = tl.load(bits + block).to(tl.int32), tl.load(starts + block)
    PIECE: tl.constexpr = TILE // 8
    plane = wire + header_size(channels, blocks) + _padded(blocks) + first * PIECE + tl.arange(0, PIECE)[None, :]
    pieces = tl.zeros([8, PIECE], tl.int32)
    for bit in tl.static_range(MOST):
        if (bit < width) & (first + bit < planes):
            pieces |= ((tl.load(plane + bit * PIECE).to(tl.int32) >> tl.arange(0, 8)[:, None]) & 1) << bit
    scale = (load_words(wire + 2 * channels, block, block < blocks) << 16).to(tl.float32, bitcast=True)
    rows = tl.load(tables + width * ROW + HALF + tl.reshape(pieces, [TILE])) * scale
    start = block * TILE
    values = change_signs(butterflies(rows, TILE, TILE), start, told_seed(wire, channels, blocks), TILE, TILE)
    values += means_at(means, start, channels, length, TILE, TILE, FORM)
    place = start + tl.arange(0, TILE)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=place < n)
