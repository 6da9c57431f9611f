"""Reference kernels of ``gauss`` (thinpipe.codecs.gauss) in plain torch: rotated Lloyd-Max quantization."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.codecs.layout import (
    GAUSS_BY_LARGEST,
    GAUSS_HUGE,
    GAUSS_LEAST,
    GAUSS_SAMPLES,
    GAUSS_SEED,
    GAUSS_STRANDS,
    gauss_reach,
    gauss_signs,
    header_bytes,
    pack,
    unpack,
)
from thinpipe.codecs.normal import magnitude_boundaries, signed_levels


class Blocks(NamedTuple):
    """Rotated blocks, one per row, with statistics of each."""

    rows: Tensor
    largest: Tensor
    finite: Tensor
    usual: Tensor  # True if the block has a scale other than 0 and NaN
    power: Tensor
    squares: Tensor  # sum of squares, in units of 2^-16 power^2


def encode_gauss(
    x: Tensor, wire: Tensor, bits: int, tile: int, channels: int, inner: int, unbiased: bool, seed: int
) -> None:
    means, blocks = rotated(x, tile, channels, inner, seed)
    codes, scale = _codes_of(blocks, bits, unbiased)
    write_header(wire, means, scale, seed)
    pack(codes.view(-1), wire[header_bytes(channels + len(scale) + GAUSS_SEED, 2) :], bits)


def decode_gauss(wire: Tensor, out: Tensor, bits: int, tile: int, channels: int, inner: int) -> None:
    blocks = -(-out.numel() // tile)
    codes = unpack(wire[header_bytes(channels + blocks + GAUSS_SEED, 2) :], blocks * tile, bits).view(blocks, tile)
    write_rows(wire, out, torch.tensor(signed_levels(bits), device=wire.device)[codes], channels, inner)


def rotated(x: Tensor, tile: int, channels: int, inner: int, seed: int) -> tuple[Tensor, Blocks]:
    """Return the means of channels, and the rotated blocks of the centred values."""
    values = x.reshape(-1).float()
    count = -(-values.numel() // tile)
    means = _channel_means(values.view(-1, channels, inner)) if channels else values.new_zeros(0)
    centred = values - _of_every_value(means, values.numel(), inner)
    rows = torch.nn.functional.pad(centred, (0, count * tile - values.numel())).view(count, tile)
    rows = butterflies(rows * gauss_signs(count, tile, seed).to(x.device))
    largest = rows.abs().amax(1)
    finite = largest < GAUSS_HUGE
    usual = finite & (largest >= GAUSS_LEAST)
    rows = torch.where(usual[:, None], rows, 0)
    power = torch.where(usual, (largest.view(torch.int32) & 0x7F800000).view(torch.float32), 1)
    squares = (rows * (2.0**8 / power)[:, None]).square().to(torch.int32).sum(1, dtype=torch.int32)
    return means, Blocks(rows, largest, finite, usual, power, squares)


def root_mean_squares(blocks: Blocks) -> Tensor:
    """Return root mean squares in units of ``power``. Uses float64: float32 sqrt in torch may be 1 ulp off on a CPU."""
    return (blocks.squares.float().double() * (2.0**-16 / blocks.rows.shape[1])).sqrt().float()


def _codes_of(blocks: Blocks, bits: int, unbiased: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of blocks."""
    rows, power, tile = blocks.rows, blocks.power, blocks.rows.shape[1]
    s = root_mean_squares(blocks) if bits < GAUSS_BY_LARGEST else blocks.largest / power * gauss_reach(tile)
    s = torch.where(blocks.usual, bfloat16_nearest(s), 1)
    t = rows * (1 / power * (1 / s))[:, None]
    codes = torch.bucketize(t.abs(), t.new_tensor(magnitude_boundaries(bits)))
    if unbiased:
        chosen = t.new_tensor(signed_levels(bits))[codes] * 2.0**8
        products = ((rows * (2.0**8 / power)[:, None]).abs() * chosen).long().sum(1)
        s = torch.where(blocks.usual, bfloat16_nearest(blocks.squares.float() / products.float()), 1)
    codes += (rows < 0) * (1 << (bits - 1))
    return codes, torch.where(blocks.usual, s * (1 / tile) * power, torch.where(blocks.finite, 0, torch.nan))


def write_header(wire: Tensor, means: Tensor, scale: Tensor, seed: int) -> None:
    values = torch.cat([means, scale])
    end = 2 * len(values)
    wire[: header_bytes(len(values) + GAUSS_SEED, 2)].zero_()
    wire[:end].copy_(bfloat16_bits(values).view(torch.uint8))
    wire[end : end + 4].copy_(torch.tensor(list(seed.to_bytes(4, "little"))))


def write_rows(wire: Tensor, out: Tensor, levels: Tensor, channels: int, inner: int) -> None:
    """Decode blocks of levels into ``out``, with the means, scales and seed in the header of the wire."""
    blocks, tile = levels.shape
    end = 2 * (channels + blocks)
    header = wire[:end].clone().view(torch.bfloat16).float()
    seed = int.from_bytes(wire[end : end + 4].tolist(), "little")
    means, scale = header[:channels], header[channels:]
    rows = butterflies(levels * scale[:, None])
    values = (rows * gauss_signs(blocks, tile, seed).to(out.device)).view(-1)[: out.numel()]
    out.view(-1).copy_(values + _of_every_value(means, out.numel(), inner))


def _channel_means(values: Tensor) -> Tensor:
    """Return the bfloat16 mean of a sample of every channel of [samples, channels, values of a channel]."""
    channels = values.shape[1]
    rows = values.transpose(1, 2).reshape(-1, channels)
    count = min(len(rows), GAUSS_SAMPLES)
    sample = rows[torch.arange(count, device=values.device) * len(rows) // count]
    strands = values.new_zeros(GAUSS_STRANDS, channels)
    for part in sample.split(GAUSS_STRANDS):
        strands[: len(part)] += part
    while len(strands) > 1:
        first, second = strands.chunk(2)
        strands = first + second
    means = bfloat16_nearest(strands[0] / count)
    return torch.where(means.isfinite(), means, 0)


def _of_every_value(means: Tensor, count: int, inner: int) -> Tensor:
    """Return the mean that belongs to each of ``count`` values; 0 without means."""
    if not len(means):
        return means.new_zeros(count)
    every = means.repeat_interleave(inner)
    return every.repeat(count // len(every))


def butterflies(rows: Tensor) -> Tensor:
    """Return the fast Walsh-Hadamard transform of each row, not normalized: pairs 1 apart first, then 2, 4 ..."""
    h = 1
    while h < rows.shape[1]:
        a, b = rows.view(rows.shape[0], -1, 2, h).unbind(2)
        rows = torch.stack([a + b, a - b], 2).view(rows.shape)
        h *= 2
    return rows


def bfloat16_nearest(x: Tensor) -> Tensor:
    """Return x rounded to bfloat16, halfway away from zero, as float32."""
    return ((x.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)


def bfloat16_bits(x: Tensor) -> Tensor:
    """Return the 16 bits of float32 values that are bfloat16 already; torch's conversion would change NaN bits."""
    return (x.view(torch.int32) >> 16).to(torch.int16)
