"""Block-wise min-max quantization of tiles to packed codes and back (thinpipe.codecs.tile)."""

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.kernels.cpu.loops.hadamard import butterflies
from thinpipe.codecs.kernels.cpu.loops.pack import pack, unpack
from thinpipe.codecs.kernels.cpu.loops.values import INFINITY, MAGNITUDE, bits_of, float_of, load_values, store_values
from thinpipe.codecs.layout import BFLOAT16_MAX, BLOCK, PIECES, TILE_HUGE, TILE_LEAST_STEP, TILE_UNIT

_FLOAT32_MAX = np.float32(np.finfo(np.float32).max)

_BFLOAT16_MAX = np.float32(BFLOAT16_MAX)
_NAN_BITS = np.uint16(0x7FC0)  # bfloat16's
_TILE_HUGE = np.float32(TILE_HUGE)
_TILE_UNIT = np.float32(TILE_UNIT)
_TILE_LEAST_STEP = np.float32(TILE_LEAST_STEP).view(np.int32)
_DRAW = np.float32(2.0**-24)


@jit
def _bfloat16_up(x):
    """Return the bits of the smallest bfloat16 that is not below x >= 0."""
    return np.int32(np.int32(bits_of(x) + 0xFFFF) & ~0xFFFF)


@jit
def _bfloat16_down(x):
    """Return the bits of the largest finite bfloat16 that is not above x; those of the lowest if all are above x."""
    bits = bits_of(x)
    down = np.int32(bits & ~0xFFFF)
    if bits < 0 and bits != down:
        down = np.int32(down + 0x10000)
    return down if float_of(down) >= -_BFLOAT16_MAX else bits_of(-_BFLOAT16_MAX)


@jit
def _tile_affine(lo, hi, top, zero):
    """Return (unit, step, origin) of a tile from lo to hi; origin is low or point. Step and low are in units of 1/unit.

    This is exactly the arithmetic that thinpipe.codecs.tile defines.
    """
    nothing = np.float32(0)
    unit = _TILE_UNIT if max(abs(lo), abs(hi)) >= _TILE_HUGE else np.float32(1)
    if zero:
        lo, hi = min(lo, nothing) * unit, max(hi, nothing) * unit
        if lo == hi:
            return unit, nothing, nothing
        point = np.rint(-lo / (hi - lo) * top)
        if lo < 0:
            point = max(point, np.float32(1))
        if hi > 0:
            point = min(point, top - np.float32(1))
        above = top - point
        least = -lo / point if point > 0 else nothing
        least = max(least, hi / above if above > 0 else nothing)
        bits = max(_bfloat16_up(least), _TILE_LEAST_STEP)
        step = float_of(bits)
        if point * step < -lo or above * step < hi:
            step = float_of(bits + 0x10000)
        return unit, min(step, _BFLOAT16_MAX * unit), point
    low = float_of(_bfloat16_down(lo)) * unit
    hi = hi * unit
    if hi <= low:
        return unit, nothing, low
    bits = max(_bfloat16_up((hi - low) / top), _TILE_LEAST_STEP)
    step = float_of(bits)
    if low + top * step < hi:
        step = float_of(bits + 0x10000)
    return unit, min(step, _BFLOAT16_MAX * unit), low


@jit
def _mix(z):
    z = np.uint32(np.uint32(z ^ np.uint32(z >> np.uint32(16))) * np.uint32(0x7FEB352D))
    z = np.uint32(np.uint32(z ^ np.uint32(z >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(z ^ np.uint32(z >> np.uint32(16)))


@jit
def _round_at_random(part, codes, unit, below, inverse, point, top, start, key):
    """Write the stochastically rounded codes of the tile at position ``start``; see thinpipe.codecs.rounding."""
    nothing = np.float32(0)
    key_low, key_high = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    base = np.uint32(start & 0xFFFFFFFF)
    added = np.uint32(key_high + np.uint32((start >> 32) * 0x9E3779B9))
    for j in range(part.size):
        place = (part[j] * unit - below) * inverse + point
        place = place if place > nothing else nothing
        place = place if place < top else top
        floor = np.int32(place)
        bits = _mix(np.uint32(_mix(np.uint32(np.uint32(base + np.uint32(j)) ^ key_low)) + added))
        draw = np.float32(np.int32(bits >> np.uint32(8))) * _DRAW
        codes[j] = np.uint8(np.int32(floor + np.int32(draw < place - np.float32(floor))))


@jit
def encode_tiles(x, params, wire, first, last, bits, tile, rot, sr, zero, key):
    """Encode units first..last of x; a unit is the larger of a tile and a block, so it has complete ones of both.

    params has a row of steps and a row of lows or points.
    """
    unit_size = max(tile, BLOCK)
    block, other = np.empty(unit_size, np.float32), np.empty(unit_size, np.float32)
    codes = np.empty(unit_size, np.uint8)
    top = np.float32((1 << bits) - 1)
    nothing, half = np.float32(0), np.float32(0.5)
    scale = np.float32(tile**-0.5)
    total = params.shape[1] * tile if rot else x.size
    for u in range(first, last):
        start = u * unit_size
        count, given = min(unit_size, total - start), min(unit_size, x.size - start)
        values = load_values(x, start, given, block)
        if rot:
            block[:given] = values
            block[given:] = 0
            values = butterflies(block, other, tile)[0][:count]
            for j in range(count):
                values[j] *= scale
        for s in range(0, count, tile):
            part = values[s : min(s + tile, count)]
            chosen = codes[s : s + part.size]
            image = part.view(np.int32)
            low_key, high_key = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
            for j in range(part.size):
                key_j = np.int32(image[j] ^ ((image[j] >> 31) & MAGNITUDE))
                low_key = min(low_key, key_j)
                high_key = max(high_key, key_j)
            t = (start + s) // tile
            if low_key <= ~INFINITY or high_key >= INFINITY:
                params[0, t], params[1, t] = _NAN_BITS, np.uint16(0) if zero else _NAN_BITS
                chosen[:] = 0
                continue
            lo = float_of(low_key ^ ((low_key >> 31) & MAGNITUDE)) + nothing  # -0 is 0
            hi = float_of(high_key ^ ((high_key >> 31) & MAGNITUDE)) + nothing
            unit, step, origin = _tile_affine(lo, hi, top, zero)
            params[0, t] = np.uint16(bits_of(step / unit) >> 16)
            params[1, t] = np.uint16(origin) if zero else np.uint16(bits_of(origin / unit) >> 16)
            inverse = np.float32(1) / step if step > 0 else nothing
            # (x - 0) * inverse + point with +zero, (x - low) * inverse + 0 without: one of the two is a no-op.
            below, point = (nothing, origin) if zero else (origin, nothing)
            if sr:
                _round_at_random(part, chosen, unit, below, inverse, point, top, start + s, key)
            else:
                for j in range(part.size):
                    place = (part[j] * unit - below) * inverse + point
                    place = (place if place > nothing else nothing) + half
                    chosen[j] = np.uint8(np.int32(place if place < top else top))
        for s in range(0, count, BLOCK):
            here = min(BLOCK, count - s)
            piece = (here + PIECES - 1) // PIECES
            codes[s + here : s + PIECES * piece] = 0
            begin = (start + s) // PIECES * bits
            pack(codes[s : s + PIECES * piece], wire[begin : begin + piece * bits], piece, bits)


@jit
def decode_tiles(wire, params, out, first, last, bits, tile, rot, zero):
    """Decode units first..last of out, as written by encode_tiles."""
    unit_size = max(tile, BLOCK)
    block, other = np.empty(unit_size, np.float32), np.empty(unit_size, np.float32)
    codes = np.empty(unit_size, np.uint8)
    scale = np.float32(tile**-0.5)
    total = params.shape[1] * tile if rot else out.size
    nothing = np.float32(0)
    for u in range(first, last):
        start = u * unit_size
        count, wanted = min(unit_size, total - start), min(unit_size, out.size - start)
        for s in range(0, count, BLOCK):
            piece = (min(BLOCK, count - s) + PIECES - 1) // PIECES
            begin = (start + s) // PIECES * bits
            unpack(wire[begin : begin + piece * bits], codes[s : s + PIECES * piece], piece, bits)
        values = block[:count]
        for s in range(0, count, tile):
            t = (start + s) // tile
            part, chosen = values[s : s + tile], codes[s : s + tile]
            step = float_of(np.int32(params[0, t]) << 16)
            low = nothing if zero else float_of(np.int32(params[1, t]) << 16)
            point = np.float32(np.int16(params[1, t])) if zero else nothing
            huge = step >= _TILE_HUGE or abs(low) >= _TILE_HUGE
            unit = _TILE_UNIT if huge else np.float32(1)
            low, step = low * unit, step * unit
            for j in range(part.size):
                part[j] = low + (np.float32(np.int32(chosen[j])) - point) * step
            if huge:
                for j in range(part.size):
                    value = part[j] / unit
                    value = _FLOAT32_MAX if value > _FLOAT32_MAX else value
                    part[j] = -_FLOAT32_MAX if value < -_FLOAT32_MAX else value
        if rot:
            values = butterflies(block, other, tile)[0][:count]
            for j in range(count):
                values[j] *= scale
        store_values(values[:wanted], out[start : start + wanted])
