"""Block-wise min-max quantization: tiles to packed codes and back, each in one pass, as in thinpipe.codecs.tile.

A program is one warp that holds a span: 2048 values, a full block of codes, or 4096 where a tile has as many. Values
next to each other are in one thread or in neighbouring ones, and those 256 apart in one thread. Therefore the minimum
and maximum of a tile and its Hadamard transform take exchanges within the warp, and packing takes none. The remainder
of a tensor after full spans is a separate launch of one program.
"""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codes import ROUND
from thinpipe.codecs.kernels.cuda.device import bits_of, greater, lesser
from thinpipe.codecs.kernels.cuda.planes import load_codes, load_short_codes, store_codes, store_fewer_codes
from thinpipe.codecs.layout import BFLOAT16_MAX as _BFLOAT16_MAX
from thinpipe.codecs.layout import TILE_HUGE, TILE_LEAST_STEP, TILE_UNIT

HUGE = tl.constexpr(TILE_HUGE)
UNIT = tl.constexpr(TILE_UNIT)
LEAST_STEP = tl.constexpr(TILE_LEAST_STEP)
BFLOAT16_MAX = tl.constexpr(_BFLOAT16_MAX)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def butterflies(values, SPAN: tl.constexpr, TILE: tl.constexpr):
    """Return the unnormalized Hadamard transform of every tile: butterflies of neighbours first, then further apart."""
    bits: tl.constexpr = bits_of(SPAN)
    cube = tl.reshape(values, [2] * bits)
    for stage in tl.static_range(bits_of(TILE)):
        word = cube.to(tl.int32, bitcast=True)
        other = (word ^ tl.xor_sum(word, bits - 1 - stage, True)).to(tl.float32, bitcast=True)
        sign = tl.reshape(1.0 - 2.0 * tl.arange(0, 2), [1] * (bits - stage - 1) + [2] + [1] * stage)
        # a + b replaces a, and a - b replaces b: a product with 1 or -1 is exact, fused or not.
        cube = tl.fma(cube, tl.broadcast_to(sign, cube.shape), other)
    return tl.reshape(cube, [SPAN])


@triton.jit
def _bfloat16_down(x):
    """Return the largest finite bfloat16 that is not above x; the lowest if all are."""
    bits = x.to(tl.int32, bitcast=True)
    down = bits & -65536
    down = tl.where((bits < 0) & (bits != down), down + 65536, down)
    return tl.maximum(down.to(tl.float32, bitcast=True), -BFLOAT16_MAX)


@triton.jit
def _bfloat16_up(x):
    """Return the smallest bfloat16 that is not below x >= 0, and at least LEAST_STEP."""
    up = (x.to(tl.int32, bitcast=True) + 65535) & -65536
    return tl.maximum(up.to(tl.float32, bitcast=True), LEAST_STEP)


@triton.jit
def _or_next(step, too_small):
    following = (step.to(tl.int32, bitcast=True) + 65536).to(tl.float32, bitcast=True)
    return tl.where(too_small, following, step)


@triton.jit
def _step(low, hi, TOP: tl.constexpr):
    step = _bfloat16_up(tl.div_rn(hi - low, 0.0 * hi + TOP))
    step = _or_next(step, low + step * TOP < hi)
    return tl.where(hi > low, step, 0.0)


@triton.jit
def _step_with_zero(lo, hi, TOP: tl.constexpr):
    constant = lo == hi
    point = tl.div_rn(-lo, tl.where(constant, 1.0, hi - lo)) * TOP
    point = (point + ROUND) - ROUND  # ties to even
    point = tl.where(lo < 0, tl.maximum(point, 1.0), point)
    point = tl.where(hi > 0, tl.minimum(point, TOP - 1.0), point)
    above = TOP - point
    below_least = tl.where(point > 0, tl.div_rn(-lo, tl.maximum(point, 1.0)), 0.0)
    above_least = tl.where(above > 0, tl.div_rn(hi, tl.maximum(above, 1.0)), 0.0)
    step = _bfloat16_up(tl.maximum(below_least, above_least))
    step = _or_next(step, (point * step < -lo) | (above * step < hi))
    return tl.where(constant, 0.0, step), tl.where(constant, 0.0, point)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 16)) * 0x7FEB352D
    z = (z ^ (z >> 15)) * 0x846CA68B
    return z ^ (z >> 16)


@triton.jit
def _draw(start, key_low, key_high, SPAN: tl.constexpr):
    """Return pseudo-random numbers in [0, 1), as in thinpipe.codecs.rounding.

    All places of a span share the high 32 bits.
    """
    place = start.to(tl.uint32) + tl.arange(0, SPAN).to(tl.uint32)
    high = key_high.to(tl.uint32) + (start >> 32).to(tl.uint32) * 0x9E3779B9
    return (_mix(_mix(place ^ key_low.to(tl.uint32)) + high) >> 8).to(tl.float32) * 2.0**-24


@triton.jit
def store_16_bits(wire, index, values, there):
    """Store 16 bits of each value byte by byte, because a wire may start anywhere."""
    tl.store(wire + 2 * index, (values & 255).to(tl.uint8), mask=there)
    tl.store(wire + 2 * index + 1, ((values >> 8) & 255).to(tl.uint8), mask=there)


@triton.jit
def load_16_bits(wire, index, there):
    low = tl.load(wire + 2 * index, mask=there, other=0).to(tl.int32)
    return low | (tl.load(wire + 2 * index + 1, mask=there, other=0).to(tl.int32) << 8)


@triton.jit
def _codes_of(
    values, start, wire, tiles, key_low, key_high,
    BITS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, ROT: tl.constexpr, SR: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Return the codes of a span, and write the header of its existing tiles to the wire."""
    COUNT: tl.constexpr = SPAN // TILE
    TOP: tl.constexpr = (1 << BITS) - 1
    if ROT:
        values = butterflies(values, SPAN, TILE) * TILE**-0.5
    rows = tl.reshape(values, [COUNT, TILE])
    lo, hi = tl.reduce(rows, 1, lesser), tl.reduce(rows, 1, greater)
    lo, hi = spread(lo, COUNT) + 0.0, spread(hi, COUNT) + 0.0  # -0 becomes 0
    finite = (lo - lo == 0) & (hi - hi == 0)
    lo, hi = tl.where(finite, lo, 0.0), tl.where(finite, hi, 0.0)
    unit = tl.where(tl.maximum(tl.abs(lo), tl.abs(hi)) >= HUGE, UNIT, 1.0)
    if ZERO:
        step, base = _step_with_zero(tl.minimum(lo, 0.0) * unit, tl.maximum(hi, 0.0) * unit, TOP)
        second = base.to(tl.int32)
    else:
        low = _bfloat16_down(lo)
        base = low * unit
        step = _step(base, hi * unit, TOP)
        second = tl.where(finite, low, float("nan")).to(tl.int32, bitcast=True) >> 16
    step = tl.minimum(step, unit * BFLOAT16_MAX)
    inverse = tl.where(step > 0, tl.div_rn(0.0 * step + 1.0, tl.where(step > 0, step, 1.0)), 0.0)
    tile = start // TILE + tl.arange(0, COUNT)
    first = tl.where(finite, step * tl.where(unit < 1, 1 / UNIT, 1.0), float("nan")).to(tl.int32, bitcast=True) >> 16
    store_16_bits(wire, tile, first, tile < tiles)
    store_16_bits(wire + 2 * tiles, tile, second, tile < tiles)
    odd = tl.max(((unit < 1) | ~finite).to(tl.int32), axis=0) > 0
    least = -base * step if ZERO else base
    if odd:  # clamp to the levels, which ordinary values exceed at most by rounding
        most = least + TOP * step
        scaled = rows * spread(unit, COUNT)[:, None]
        scaled = tl.minimum(tl.maximum(scaled, spread(least, COUNT)[:, None]), spread(most, COUNT)[:, None])
        rows = tl.where(spread(finite.to(tl.int32), COUNT)[:, None] > 0, scaled, 0.0)
    base, inverse = spread(base, COUNT)[:, None], spread(inverse, COUNT)[:, None]
    t = rows * inverse + base if ZERO else (rows - base) * inverse
    t = tl.reshape(t, [SPAN])
    if SR:
        t = tl.minimum(tl.maximum(t, 0.0), 1.0 * TOP)
        floor = tl.floor(t)
        chance = _draw(start, key_low, key_high, SPAN)
        return floor.to(tl.int32) + (chance < t - floor).to(tl.int32)
    else:
        return (t + 0.5).to(tl.int32)


@triton.jit
def spread(each, COUNT: tl.constexpr):
    """Distribute numbers over threads, one each; otherwise every thread computes those of all tiles it has a part of.

    A second call returns the numbers to the threads of their tiles.
    """
    return tl.gather(each, tl.arange(0, COUNT), 0)


@triton.jit(do_not_specialize=["tiles", "key_low", "key_high"])
def encode_tile_kernel(
    x, wire, tiles, key_low, key_high,
    BITS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, ROT: tl.constexpr, SR: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Encode one full span per program."""
    start = tl.program_id(0).to(tl.int64) * SPAN
    key_low, key_high = tl.cast(key_low, tl.int32), tl.cast(key_high, tl.int32)
    values = tl.load(x + start + tl.arange(0, SPAN)).to(tl.float32)
    codes = _codes_of(values, start, wire, tiles, key_low, key_high, BITS, TILE, SPAN, ROT, SR, ZERO)
    store_codes(codes, wire + 4 * tiles + start // 8 * BITS, BITS, SPAN)


@triton.jit(do_not_specialize=["n", "key_low", "key_high"])
def encode_rest_kernel(
    x, n, wire, key_low, key_high, spare,
    BITS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, ROT: tl.constexpr, SR: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Encode the remainder after full spans, with one program."""
    tiles = tl.cdiv(n, TILE)
    start = tl.cast(n, tl.int64) // SPAN * SPAN
    key_low, key_high = tl.cast(key_low, tl.int32), tl.cast(key_high, tl.int32)
    place = tl.arange(0, SPAN)
    if ROT:
        values = tl.load(x + start + place, mask=start + place < n, other=0.0).to(tl.float32)
        count = tl.cast(tiles, tl.int64) * TILE - start
    else:  # repeat the last value, which changes neither end of its tile
        values = tl.load(x + tl.minimum(start + place, n - 1)).to(tl.float32)
        count = n - start
    codes = _codes_of(values, start, wire, tiles, key_low, key_high, BITS, TILE, SPAN, ROT, SR, ZERO)
    store_fewer_codes(codes, count, spare, wire + 4 * tiles + start // 8 * BITS, BITS, SPAN)


@triton.jit
def _values_of(
    codes, start, wire, tiles, TILE: tl.constexpr, SPAN: tl.constexpr, ROT: tl.constexpr, ZERO: tl.constexpr
):
    COUNT: tl.constexpr = SPAN // TILE
    tile = start // TILE + tl.arange(0, COUNT)
    step = (load_16_bits(wire, tile, tile < tiles) << 16).to(tl.float32, bitcast=True)
    second = load_16_bits(wire + 2 * tiles, tile, tile < tiles) << 16
    rows = tl.reshape(codes, [COUNT, TILE])
    if ZERO:
        unit = tl.where(step >= HUGE, UNIT, 1.0)
        scaled = (rows - (second >> 16)[:, None]).to(tl.float32) * (step * unit)[:, None]
    else:
        low = second.to(tl.float32, bitcast=True)
        unit = tl.where(tl.maximum(tl.abs(low), step) >= HUGE, UNIT, 1.0)
        scaled = (low * unit)[:, None] + rows.to(tl.float32) * (step * unit)[:, None]
    if tl.min(unit, axis=0) < 1:
        kept_finite = tl.minimum(tl.maximum(scaled * (1 / UNIT), -FLOAT_MAX), FLOAT_MAX)
        scaled = tl.where(unit[:, None] < 1, kept_finite, scaled)
    values = tl.reshape(scaled, [SPAN])
    if ROT:
        values = butterflies(values, SPAN, TILE) * TILE**-0.5
    return values


@triton.jit(do_not_specialize=["tiles"])
def decode_tile_kernel(
    wire, out, tiles, BITS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, ROT: tl.constexpr, ZERO: tl.constexpr
):
    """Decode one full span per program: the inverse of encode_tile_kernel."""
    start = tl.program_id(0).to(tl.int64) * SPAN
    codes = load_codes(wire + 4 * tiles + start // 8 * BITS, BITS, SPAN)
    values = _values_of(codes, start, wire, tiles, TILE, SPAN, ROT, ZERO)
    tl.store(out + start + tl.arange(0, SPAN), values.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["n", "tiles"])
def decode_rest_kernel(
    wire, out, n, tiles,
    BITS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, ROT: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Decode the remainder after full spans: the inverse of encode_rest_kernel."""
    start = tl.cast(n, tl.int64) // SPAN * SPAN
    count = tl.cast(tiles, tl.int64) * TILE - start if ROT else n - start
    codes = load_short_codes(wire + 4 * tiles + start // 8 * BITS, count, BITS, SPAN)
    values = _values_of(codes, start, wire, tiles, TILE, SPAN, ROT, ZERO)
    place = start + tl.arange(0, SPAN)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=place < n)
