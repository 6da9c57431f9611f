"""Rotated Lloyd-Max quantization: blocks to packed codes and back, each in one pass, as in thinpipe.codecs.gauss.

Programs, spans and the remainder after full spans are as in tiles.py. Before them a small launch computes the means of
channels, or copies them from the wire, which may start at any byte, to memory of their own.
"""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codes import bucket_of
from thinpipe.codecs.kernels.cuda.device import bits_of, greater
from thinpipe.codecs.kernels.cuda.planes import load_codes, load_short_codes, store_codes, store_fewer_codes
from thinpipe.codecs.kernels.cuda.tiles import butterflies, load_16_bits, spread, store_16_bits
from thinpipe.codecs.layout import (
    BLOCK,
    GAUSS_BLOCK,
    GAUSS_BY_LARGEST,
    GAUSS_HUGE,
    GAUSS_LEAST,
    GAUSS_MIX,
    GAUSS_PLACE,
    GAUSS_SAMPLES,
    GAUSS_SEED,
    GAUSS_STRANDS,
    HEADER_ALIGN,
    gauss_reach,
)

HUGE = tl.constexpr(GAUSS_HUGE)
LEAST = tl.constexpr(GAUSS_LEAST)
BY_LARGEST = tl.constexpr(GAUSS_BY_LARGEST)
BLOCK_FACTOR, PLACE_FACTOR, MIX_FACTOR = (
    tl.constexpr(factor - (1 << 32))
    for factor in (GAUSS_BLOCK, GAUSS_PLACE, GAUSS_MIX)  # as int32, which wraps alike
)
SAMPLES = tl.constexpr(GAUSS_SAMPLES)
SEED = tl.constexpr(GAUSS_SEED)
STRANDS = tl.constexpr(GAUSS_STRANDS)
ALIGN = tl.constexpr(HEADER_ALIGN)
CHANNELS = tl.constexpr(32)  # per program that computes means
READ = tl.constexpr(1024)  # means per program that reads them
ONE = tl.constexpr(0x3F800000)
INFINITY = tl.constexpr(0x7F800000)

# How means belong to values: in rounds of places, of complete blocks or of any length; or in runs of neighbours.
COMPLETE_BLOCKS = tl.constexpr(1)
IN_TURN = tl.constexpr(2)
RUNS = tl.constexpr(3)
UNBIASED = 4  # added to one of these forms

reach_of = triton.constexpr_function(gauss_reach)


@triton.constexpr_function
def span_of(tile):
    """Return the values of a program: a rotated block or a block of packed codes, whichever is larger."""
    return max(tile, BLOCK)


def form_of(channels: int, inner: int, tile: int, span: int) -> tuple[int, int]:
    """Return the form of means, 0 for none, and its length: the means of a round, or the values of a run."""
    if inner >= span:
        return RUNS.value, inner
    every = channels * inner
    return (0 if not channels else IN_TURN.value if every % tile else COMPLETE_BLOCKS.value), every


@triton.jit
def nearest_bfloat16(x):
    return (x.to(tl.int32, bitcast=True) + 0x8000) & -65536


@triton.jit(do_not_specialize=["n", "channels", "inner"])
def channel_means_kernel(x, n, wire, means, channels, inner):
    """Compute the means of a sample of each channel, and write them to the wire and to memory."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    of_each = tl.cast(n, tl.int64) // channels
    count = tl.minimum(of_each, SAMPLES)
    strands = tl.zeros([STRANDS, CHANNELS], tl.float32)
    for step in tl.static_range(SAMPLES // STRANDS):
        k = step * STRANDS + tl.arange(0, STRANDS).to(tl.int64)
        place = tl.where(of_each < SAMPLES, k, k * of_each // SAMPLES)
        row, within = place // inner, place % inner
        at = (row[:, None] * channels + channel[None, :]) * inner + within[:, None]
        sampled = (k < count)[:, None] & there[None, :]
        strands += tl.load(x + at, mask=sampled, other=0.0).to(tl.float32)
    for level in tl.static_range(bits_of(STRANDS)):
        strands = tl.sum(tl.reshape(strands, [2, STRANDS >> (level + 1), CHANNELS]), axis=0)
    total = tl.reshape(strands, [CHANNELS])
    bits = nearest_bfloat16(tl.div_rn(total, 0.0 * total + count.to(tl.float32)))
    bits = tl.where((bits & 0x7FFFFFFF) < INFINITY, bits, 0)
    store_16_bits(wire, channel, bits >> 16, there)
    tl.store(means + channel, bits.to(tl.float32, bitcast=True), mask=there)


@triton.jit(do_not_specialize=["channels"])
def read_means_kernel(wire, means, channels):
    channel = tl.program_id(0) * READ + tl.arange(0, READ)
    there = channel < channels
    tl.store(means + channel, (load_16_bits(wire, channel, there) << 16).to(tl.float32, bitcast=True), mask=there)


@triton.jit
def means_at(means, start, channels, length, TILE: tl.constexpr, SPAN: tl.constexpr, FORM: tl.constexpr):
    """Return the mean that belongs to every value of a span; 0 without means."""
    place = tl.arange(0, SPAN)
    if FORM & 3 == COMPLETE_BLOCKS:
        rounds = length // TILE
        first = ((start // TILE % rounds).to(tl.int32) + tl.arange(0, SPAN // TILE)) % rounds * TILE
        return tl.reshape(tl.load(means + first[:, None] + tl.arange(0, TILE)[None, :]), [SPAN])
    elif FORM & 3 == IN_TURN:
        at = (start % length).to(tl.int32) + place
        if length > SPAN:
            at = tl.where(at >= length, at - length, at)
        else:  # at // length: the half keeps the quotient away from where rounding would matter
            at -= ((at.to(tl.float32) + 0.5) * (1.0 / tl.cast(length, tl.float32))).to(tl.int32) * length
        return tl.load(means + at)
    elif FORM & 3 == RUNS:
        run = start // length
        here, following = tl.load(means + run % channels), tl.load(means + (run + 1) % channels)
        return tl.where(place < ((run + 1) * length - start).to(tl.int32), here, following)
    else:
        return tl.zeros([SPAN], tl.float32)


@triton.jit
def change_signs(values, start, seed, SPAN: tl.constexpr, TILE: tl.constexpr):
    """Multiply values by the signs of thinpipe.codecs.layout.gauss_signs."""
    place = tl.arange(0, SPAN)
    block = (start // TILE).to(tl.int32) + place // TILE + seed
    mixed = block * BLOCK_FACTOR + place % TILE * PLACE_FACTOR
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * MIX_FACTOR
    return (values.to(tl.int32, bitcast=True) ^ (mixed & -(2**31))).to(tl.float32, bitcast=True)


@triton.jit
def header_size(channels, blocks):
    """Return the size of the header in bytes."""
    return (tl.cast(channels, tl.int64) + blocks + SEED + (ALIGN // 2 - 1)) // (ALIGN // 2) * ALIGN


@triton.jit
def store_seed(wire, channels, blocks, seed):
    """Write the end of a header: the seed and the padding, up to 18 bytes."""
    place = tl.arange(0, 2 * ALIGN)
    at = 2 * (tl.cast(channels, tl.int64) + blocks) + place
    byte = tl.where(place < 4, seed >> (8 * tl.minimum(place, 3)), 0)
    tl.store(wire + at, (byte & 255).to(tl.uint8), mask=at < header_size(channels, blocks))


@triton.jit
def load_seed(wire, channels, blocks):
    seed = wire + 2 * (tl.cast(channels, tl.int64) + blocks)
    return load_16_bits(seed, 0, True) | (load_16_bits(seed, 1, True) << 16)


@triton.jit
def _codes_of(
    values, start, wire, tables, blocks, channels, seed,
    BITS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Return the codes of centred values, and write the scales of the existing blocks to the wire.

    tables: HALF boundaries, of which the last is infinity, then as many positive levels.
    """
    COUNT: tl.constexpr = SPAN // TILE
    rows = tl.reshape(butterflies(change_signs(values, start, seed, SPAN, TILE), SPAN, TILE), [COUNT, TILE])
    largest = spread(tl.reduce(tl.abs(rows), 1, greater), COUNT)
    finite = largest < HUGE
    usual = finite & (largest >= LEAST)
    if tl.min(usual.to(tl.int32), axis=0) == 0:
        rows = tl.where(spread(usual.to(tl.int32), COUNT)[:, None] > 0, rows, 0.0)
    power = tl.where(usual, largest.to(tl.int32, bitcast=True) & INFINITY, ONE)
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)  # the biased exponents of both sum to 254
    if BITS < BY_LARGEST or FORM > RUNS:
        components = rows * spread(inverse * 256.0, COUNT)[:, None]
        total = spread(tl.sum((components * components).to(tl.int32), axis=1), COUNT)
    if BITS >= BY_LARGEST:
        s = largest * inverse * reach_of(TILE)
    else:
        s = tl.sqrt_rn(total.to(tl.float32) * (2.0**-16 / TILE))
    s = tl.where(usual, nearest_bfloat16(s).to(tl.float32, bitcast=True), 1.0)
    factor = inverse * tl.div_rn(0.0 * s + 1.0, s)
    HALF: tl.constexpr = 1 << (BITS - 1)
    codes = bucket_of(tl.abs(rows * spread(factor, COUNT)[:, None]), tables, HALF)
    if FORM > RUNS:
        chosen = tl.load(tables + HALF + codes) * 256.0
        products = spread(tl.sum((tl.abs(components) * chosen).to(tl.uint32), axis=1), COUNT)
        s = tl.div_rn(total.to(tl.float32), tl.maximum(products.to(tl.float32), 1.0))
        s = tl.where(usual, nearest_bfloat16(s).to(tl.float32, bitcast=True), 1.0)
    scale = tl.where(usual, s * (1.0 / TILE) * power.to(tl.float32, bitcast=True), 0.0)
    scale = tl.where(finite, scale, float("nan"))
    block = start // TILE + tl.arange(0, COUNT)
    store_16_bits(wire + 2 * channels, block, scale.to(tl.int32, bitcast=True) >> 16, block < blocks)
    if start == 0:
        store_seed(wire, channels, blocks, seed)
    return tl.reshape(codes + tl.where(rows < 0, HALF, 0), [SPAN])


@triton.jit(do_not_specialize=["blocks", "channels", "length", "seed"])
def encode_gauss_kernel(
    x, wire, means, tables, blocks, channels, length, seed, BITS: tl.constexpr, TILE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Encode one full span per program."""
    SPAN: tl.constexpr = span_of(TILE)
    start = tl.program_id(0).to(tl.int64) * SPAN
    values = tl.load(x + start + tl.arange(0, SPAN)).to(tl.float32)
    values -= means_at(means, start, channels, length, TILE, SPAN, FORM)
    codes = _codes_of(values, start, wire, tables, blocks, channels, seed, BITS, TILE, SPAN, FORM)
    store_codes(codes, wire + header_size(channels, blocks) + start // 8 * BITS, BITS, SPAN)


@triton.jit(do_not_specialize=["n", "channels", "length", "seed"])
def encode_rest_kernel(
    x, n, wire, means, tables, channels, length, spare, seed,
    BITS: tl.constexpr, TILE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Encode the remainder after full spans, with one program."""
    SPAN: tl.constexpr = span_of(TILE)
    start = tl.cast(n, tl.int64) // SPAN * SPAN
    blocks = tl.cdiv(n, TILE)
    there = start + tl.arange(0, SPAN) < n
    values = tl.load(x + start + tl.arange(0, SPAN), mask=there, other=0.0).to(tl.float32)
    values = tl.where(there, values - means_at(means, start, channels, length, TILE, SPAN, FORM), 0.0)
    codes = _codes_of(values, start, wire, tables, blocks, channels, seed, BITS, TILE, SPAN, FORM)
    count = tl.cast(blocks, tl.int64) * TILE - start
    store_fewer_codes(codes, count, spare, wire + header_size(channels, blocks) + start // 8 * BITS, BITS, SPAN)


@triton.jit
def _values_of(
    codes, start, wire, means, levels, blocks, channels, length,
    TILE: tl.constexpr, SPAN: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    block = start // TILE + tl.arange(0, SPAN // TILE)
    scale = (load_16_bits(wire + 2 * channels, block, block < blocks) << 16).to(tl.float32, bitcast=True)
    rows = tl.reshape(tl.load(levels + codes), [SPAN // TILE, TILE]) * scale[:, None]
    seed = load_seed(wire, channels, blocks)
    values = change_signs(butterflies(tl.reshape(rows, [SPAN]), SPAN, TILE), start, seed, SPAN, TILE)
    return values + means_at(means, start, channels, length, TILE, SPAN, FORM)


@triton.jit(do_not_specialize=["blocks", "channels", "length"])
def decode_gauss_kernel(
    wire, out, means, levels, blocks, channels, length, BITS: tl.constexpr, TILE: tl.constexpr, FORM: tl.constexpr
):
    """Decode one full span per program: the inverse of encode_gauss_kernel."""
    SPAN: tl.constexpr = span_of(TILE)
    start = tl.program_id(0).to(tl.int64) * SPAN
    codes = load_codes(wire + header_size(channels, blocks) + start // 8 * BITS, BITS, SPAN)
    values = _values_of(codes, start, wire, means, levels, blocks, channels, length, TILE, SPAN, FORM)
    tl.store(out + start + tl.arange(0, SPAN), values.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["n", "blocks", "channels", "length"])
def decode_rest_kernel(
    wire, out, n, means, levels, blocks, channels, length, BITS: tl.constexpr, TILE: tl.constexpr, FORM: tl.constexpr
):
    """Decode the remainder after full spans: the inverse of encode_rest_kernel."""
    SPAN: tl.constexpr = span_of(TILE)
    start = tl.cast(n, tl.int64) // SPAN * SPAN
    count = tl.cast(blocks, tl.int64) * TILE - start
    codes = load_short_codes(wire + header_size(channels, blocks) + start // 8 * BITS, count, BITS, SPAN)
    values = _values_of(codes, start, wire, means, levels, blocks, channels, length, TILE, SPAN, FORM)
    place = start + tl.arange(0, SPAN)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=place < n)
