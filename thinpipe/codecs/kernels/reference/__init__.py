"""Reference kernels of all codecs in plain torch, written as the definitions: the standard for results and speed.

Algorithm 1 sorts, Algorithm 2 takes kth values, k-means runs Lloyd's algorithm over all values. Nothing here is fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinpipe.codecs.kernels.reference.golomb_rice import decode_coded as decode_coded
from thinpipe.codecs.kernels.reference.golomb_rice import encode_coded as encode_coded
from thinpipe.codecs.kernels.reference.lloyd_max import bfloat16_bits, butterflies
from thinpipe.codecs.kernels.reference.lloyd_max import decode_gauss as decode_gauss
from thinpipe.codecs.kernels.reference.lloyd_max import encode_gauss as encode_gauss
from thinpipe.codecs.kernels.reference.pca import decode_axes as decode_axes
from thinpipe.codecs.kernels.reference.pca import encode_axes as encode_axes
from thinpipe.codecs.kernels.reference.pca import find_gains as find_gains
from thinpipe.codecs.kernels.reference.pca import fold_moments as fold_moments
from thinpipe.codecs.layout import (
    BFLOAT16_MAX,
    TILE_HUGE,
    TILE_LEAST_STEP,
    TILE_UNIT,
    bucket_affine,
    bucket_bounds,
    bucket_values,
    header_bytes,
    midpoints,
    move_to_zero,
    pack,
    positions_are_bits,
    read_header,
    unpack,
    with_zero,
    write_header,
    write_poisoned,
)

_UINT32 = 0xFFFFFFFF
_FINITE = (torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)

LLOYD_STEPS = 20  # the smaller of the two counts that the research code behind this measured (20 and 50)


def encode_sort(x: Tensor, wire: Tensor, level_bits: int, split_bits: int, zero: bool = False) -> None:
    """Encode by Algorithm 1: sort, split the sorted values into buckets of equal count, quantize each bucket."""
    values = x.reshape(-1).float()
    order = torch.sort(values).indices if split_bits else torch.arange(values.numel(), device=x.device)
    _write_buckets(wire, values, order.tensor_split(1 << split_bits), level_bits, split_bits, zero)


def encode_fast(x: Tensor, wire: Tensor, level_bits: int, split_bits: int, zero: bool = False) -> None:
    """Encode by Algorithm 2: find each bucket's maximum as a kth value; values go to the first bucket that covers them.

    Equal values on both sides of a cut all go to the lower bucket. The upper bucket's minimum is still the value that a
    sort would put first there, so both algorithms have the same minimums and steps.
    """
    values = x.reshape(-1).float()
    bounds = bucket_bounds(values.numel(), 1 << split_bits)
    lo, hi = [], []
    for start, stop in bounds:
        if start < stop:
            lo.append(torch.kthvalue(values, start + 1).values)
            hi.append(torch.kthvalue(values, stop).values)
        else:
            lo.append(hi[-1])
            hi.append(hi[-1])
    low, high = torch.stack(lo), torch.stack(hi)
    if not torch.isfinite(values).all():
        write_poisoned(wire, 2 << split_bits)
        return
    bucket = torch.bucketize(values, high[:-1].contiguous())
    _write_codes(wire, values, bucket, low, high, level_bits, split_bits, zero)


def decode_buckets(wire: Tensor, out: Tensor, level_bits: int, split_bits: int) -> None:
    lo, hi = read_header(wire, 2 << split_bits).view(2, -1)
    _look_up(wire[header_bytes(2 << split_bits) :], out, bucket_values(lo, hi, level_bits), level_bits + split_bits)


def encode_kmeans(x: Tensor, wire: Tensor, bits: int, zero: bool = False) -> None:
    """Encode by Lloyd's algorithm: from evenly spaced values, move each to the mean of the values nearest to it."""
    values = x.reshape(-1).float()
    if not torch.isfinite(values).all():
        write_poisoned(wire, 1 << bits)
        return
    lo, hi = values.double().aminmax()
    codebook = lo + (hi - lo) * (torch.arange(1 << bits, device=x.device, dtype=torch.float64) + 0.5) / (1 << bits)
    for _ in range(LLOYD_STEPS):
        nearest = _nearest(values, codebook)
        population = torch.bincount(nearest, minlength=1 << bits)
        total = torch.bincount(nearest, weights=values.double(), minlength=1 << bits)
        codebook = torch.where(population > 0, total / population.clamp(min=1), codebook)
    codebook = codebook.float()
    if zero and lo <= 0 <= hi:
        codebook = with_zero(codebook)
    write_header(wire, codebook)
    pack(_nearest(values, codebook), wire[header_bytes(1 << bits) :], bits)


def decode_kmeans(wire: Tensor, out: Tensor, bits: int) -> None:
    _look_up(wire[header_bytes(1 << bits) :], out, read_header(wire, 1 << bits), bits)


def encode_tile(x: Tensor, wire: Tensor, bits: int, tile: int, rot: bool, sr: bool, zero: bool, key: int) -> None:
    """Encode as thinpipe.codecs.tile defines, on a matrix with one tile per row."""
    values = x.reshape(-1).float()
    tiles = -(-values.numel() // tile)
    missing = values.new_zeros(1) if rot else values[-1:]  # without +rot padding that keeps both ends of a tile
    rows = torch.cat([values, missing.expand(tiles * tile - values.numel())]).view(tiles, tile)
    if rot:
        rows = hadamard(rows)
    finite = rows.isfinite().all(1)
    rows = torch.where(finite[:, None], rows, 0)
    lo, hi = (end + 0.0 for end in rows.aminmax(dim=1))  # -0 is 0
    top = (1 << bits) - 1
    unit = torch.where(torch.maximum(lo.abs(), hi.abs()) >= TILE_HUGE, TILE_UNIT, 1.0)
    if zero:
        lo, hi = lo.clamp(max=0), hi.clamp(min=0)
        step, point = _tile_with_zero(lo * unit, hi * unit, top)
    else:
        low = _bfloat16_down(lo)
        step = _tile_step(low * unit, hi * unit, top)
    step = torch.minimum(step, BFLOAT16_MAX * unit)
    inverse = torch.where(step > 0, 1 / step, 0)[:, None]
    scaled = rows * unit[:, None]
    t = scaled * inverse + point[:, None] if zero else (scaled - (low * unit)[:, None]) * inverse
    t = t.clamp(0, top)
    if sr:
        floor = t.floor()
        codes = floor + (_draws(rows.numel(), key, x.device).view_as(t) < t - floor)
    else:
        codes = (t + 0.5).floor().clamp(max=top)
    params = torch.stack(
        [
            bfloat16_bits(torch.where(finite, step / unit, torch.nan)),
            point.to(torch.int16) if zero else bfloat16_bits(torch.where(finite, low, torch.nan)),
        ]
    )
    wire[: 4 * tiles].copy_(params.view(-1).view(torch.uint8))
    travelling = tiles * tile if rot else values.numel()
    pack(codes.long().view(-1)[:travelling], wire[4 * tiles :], bits)


def decode_tile(wire: Tensor, out: Tensor, bits: int, tile: int, rot: bool, zero: bool) -> None:
    tiles = -(-out.numel() // tile)
    params = wire[: 4 * tiles].clone().view(torch.int16).view(2, tiles, 1)
    codes = unpack(wire[4 * tiles :], tiles * tile if rot else out.numel(), bits).float()
    rows = torch.nn.functional.pad(codes, (0, tiles * tile - codes.numel())).view(tiles, tile)
    step = params[0].view(torch.bfloat16).float()
    low = torch.zeros_like(step) if zero else params[1].view(torch.bfloat16).float()
    unit = torch.where(torch.maximum(low.abs(), step) >= TILE_HUGE, TILE_UNIT, 1.0)
    scaled = (rows - params[1].float()) * (step * unit) if zero else low * unit + rows * (step * unit)
    rows = torch.where(unit < 1, (scaled / unit).clamp(*_FINITE), scaled)
    if rot:
        rows = hadamard(rows)
    out.view(-1).copy_(rows.reshape(-1)[: out.numel()])


def hadamard(rows: Tensor) -> Tensor:
    """Return the orthonormal Hadamard transform of each row; it is its own inverse."""
    return butterflies(rows) * rows.shape[1] ** -0.5


def _tile_step(low: Tensor, hi: Tensor, top: int) -> Tensor:
    """Return the step with which ``top`` steps from low reach hi; 0 if low reaches hi."""
    step = _bfloat16_up((hi - low) / top).clamp(min=TILE_LEAST_STEP)
    # One increment is enough: the quotient is less than 2^-22 (relative) too small, the next bfloat16 is 2^-8 larger.
    step = torch.where(low + top * step < hi, _next_bfloat16(step), step)
    return torch.where(hi > low, step, 0)


def _tile_with_zero(lo: Tensor, hi: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the step and the zero point, the number of steps below zero, that cover lo <= 0 to hi >= 0."""
    constant = lo == hi
    point = (-lo / (hi - lo) * top).round()
    point = torch.where(lo < 0, point.clamp(min=1), point)
    point = torch.where(hi > 0, point.clamp(max=top - 1), point)
    below, above = point, top - point
    least = torch.maximum(
        torch.where(below > 0, -lo / below.clamp(min=1), 0), torch.where(above > 0, hi / above.clamp(min=1), 0)
    )
    step = _bfloat16_up(least).clamp(min=TILE_LEAST_STEP)
    step = torch.where((below * step < -lo) | (above * step < hi), _next_bfloat16(step), step)
    return torch.where(constant, 0, step), torch.where(constant, 0, point)


def _bfloat16_down(x: Tensor) -> Tensor:
    """Return the largest finite bfloat16 that is not above x, as float32; the lowest if all are above x."""
    bits = x.view(torch.int32)
    down = bits & ~0xFFFF
    down = torch.where((bits < 0) & (bits != down), down + 0x10000, down)
    return down.view(torch.float32).clamp(min=-BFLOAT16_MAX)


def _bfloat16_up(x: Tensor) -> Tensor:
    """Return the smallest bfloat16 that is not below x >= 0, as float32."""
    return ((x.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _next_bfloat16(x: Tensor) -> Tensor:
    return (x.view(torch.int32) + 0x10000).view(torch.float32)


def _draws(count: int, key: int, device: torch.device) -> Tensor:
    """Return a random number in [0, 1) for each position under a 64-bit key. See thinpipe.codecs.rounding."""
    i = torch.arange(count, device=device)
    z = _mix((i & _UINT32) ^ (key & _UINT32))
    z = (z + (key >> 32) + (i >> 32) * 0x9E3779B9) & _UINT32
    return (_mix(z) >> 8).float() * 2.0**-24


def _mix(z: Tensor) -> Tensor:
    """Hash 32-bit integers by a bijection in which every bit of the result depends on every bit of z."""
    z = ((z ^ (z >> 16)) * 0x7FEB352D) & _UINT32
    z = ((z ^ (z >> 15)) * 0x846CA68B) & _UINT32
    return z ^ (z >> 16)


def encode_topk(x: Tensor, wire: Tensor, kept: int) -> None:
    values = x.reshape(-1).float()
    magnitude = values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    where = torch.sort(magnitude, descending=True, stable=True).indices[:kept].sort().values
    write_topk(wire, values[where], where, values.numel())


def decode_topk(wire: Tensor, out: Tensor, kept: int) -> None:
    values = read_header(wire, kept)
    count = out.numel()
    if positions_are_bits(count, kept):
        shifts = torch.arange(8, dtype=torch.uint8, device=wire.device)
        mask = ((wire[4 * kept :, None] >> shifts) & 1).reshape(-1)[:count].bool()
        where = mask.nonzero().reshape(-1)[:kept]
    else:
        where = wire[4 * kept :].clone().view(torch.int32).long()
        values, where = values[(where >= 0) & (where < count)], where[(where >= 0) & (where < count)]
    flat = out.view(-1).zero_()
    flat[where] = values[: where.numel()].to(out.dtype)


def write_topk(wire: Tensor, values: Tensor, where: Tensor, count: int) -> None:
    """Write kept values and their ascending positions among ``count`` values to the wire."""
    kept = values.numel()
    wire[: 4 * kept].copy_(values.view(torch.uint8))
    if positions_are_bits(count, kept):
        mask = torch.zeros(-(-count // 8) * 8, dtype=torch.uint8, device=wire.device)
        mask[where] = 1
        weights = 1 << torch.arange(8, dtype=torch.uint8, device=wire.device)
        wire[4 * kept :].copy_((mask.view(-1, 8) * weights).sum(1, dtype=torch.uint8))
    else:
        wire[4 * kept :].copy_(where.to(torch.int32).view(torch.uint8))


def _write_buckets(
    wire: Tensor,
    values: Tensor,
    buckets: list[Tensor] | tuple[Tensor, ...],
    level_bits: int,
    split_bits: int,
    zero: bool,
) -> None:
    if not torch.isfinite(values).all():
        write_poisoned(wire, 2 << split_bits)
        return
    bucket = torch.empty(values.numel(), dtype=torch.int64, device=values.device)
    lo: list[Tensor] = []
    hi: list[Tensor] = []
    for i, members in enumerate(buckets):
        # With fewer values than buckets the last buckets are empty: they repeat the bucket before.
        low, high = values[members].aminmax() if members.numel() else (hi[-1], hi[-1])
        lo.append(low)
        hi.append(high)
        bucket[members] = i
    _write_codes(wire, values, bucket, torch.stack(lo), torch.stack(hi), level_bits, split_bits, zero)


def _write_codes(
    wire: Tensor, values: Tensor, bucket: Tensor, lo: Tensor, hi: Tensor, level_bits: int, split_bits: int, zero: bool
) -> None:
    levels = (1 << level_bits) - 1
    if zero:
        lo, hi = move_to_zero(lo, hi, level_bits)
    p, offset, scale = bucket_affine(lo, hi, levels)
    level = ((values * p[bucket] - offset[bucket]) * scale[bucket]).round().clamp(0, levels)
    write_header(wire, torch.stack([lo, hi]))
    codes = (bucket << level_bits) | level.long()
    pack(codes, wire[header_bytes(2 << split_bits) :], level_bits + split_bits)


def _nearest(values: Tensor, codebook: Tensor) -> Tensor:
    """Return the index of the nearest of ascending codebook values; a midpoint goes to the lower one."""
    return torch.bucketize(values, midpoints(codebook))


def _look_up(packed: Tensor, out: Tensor, table: Tensor, bits: int) -> None:
    out.view(-1).copy_(table[unpack(packed, out.numel(), bits)])
