"""Reference kernels of ``axes`` (thinpipe.links.learned.transform) in plain torch: gains, bit planes and moments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinpipe.codecs.layout import AXES_LEAST_GAIN, AXES_REACH


def find_gains(z: Tensor, share: Tensor, gains: Tensor) -> None:
    root_mean_square = torch.linalg.vector_norm(z, dim=0) * share
    largest = torch.linalg.vector_norm(z, math.inf, dim=0)
    gains.copy_(torch.maximum(root_mean_square, largest / AXES_REACH).clamp(min=AXES_LEAST_GAIN))


def encode_axes(z: Tensor, gains: Tensor, bits: Tensor, starts: Tensor, limits: Tensor, planes: Tensor) -> None:
    codes = torch.searchsorted(limits[bits.int()], z / gains.float(), right=True, out_int32=True)
    codes = torch.minimum(codes, (1 << bits.int()[:, None]) - 1).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, 8 * planes.shape[1] - z.shape[1]))
    planes.copy_(to_planes(codes, bits, starts, len(planes)))


def decode_axes(planes: Tensor, gains: Tensor, bits: Tensor, starts: Tensor, levels: Tensor, z: Tensor) -> None:
    codes = from_planes(planes, bits, starts)
    torch.mul(levels[bits.int()].gather(1, codes[:, : z.shape[1]].long()), gains.float(), out=z)


def fold_moments(
    step: Tensor, size: int, rate: float, seen: int, before: Tensor, weight: Tensor, moments: Tensor, new_weight: Tensor
) -> None:
    """Update the moving averages with a step of ``seen`` rows of ``size`` columns; skip a step that is not finite."""
    squares = step[: step.numel() // (size + 1) * size].view(-1, size * size)[:, :: size + 1]
    finite = squares.amax() < torch.inf
    moments.copy_(torch.where(finite, before.lerp(step / seen, rate), before))
    new_weight.copy_(torch.where(finite, weight * (1 - rate) + rate, weight))


def to_planes(codes: Tensor, bits: Tensor, starts: Tensor, count: int) -> Tensor:
    """Return ``count`` bit planes of uint8 codes, which have one row per axis and ``bits`` planes each."""
    axis, bit = _of_planes(bits, starts, count)
    apart = ((codes[axis] >> bit) & 1).unflatten(1, (8, -1))
    return (apart << _pieces(codes)).sum(1, dtype=torch.uint8)


def from_planes(planes: Tensor, bits: Tensor, starts: Tensor) -> Tensor:
    """Return the codes of bit planes: the inverse of ``to_planes``. Ignores planes beyond those that bits allot."""
    axis, bit = _of_planes(bits, starts, len(planes))
    known = (torch.arange(len(planes), device=planes.device) < starts[-1] + bits[-1])[:, None]
    apart = (((planes * known)[:, None] >> _pieces(planes)) & 1).flatten(1)
    codes = torch.zeros(len(bits), apart.shape[1], dtype=torch.uint8, device=planes.device)
    return codes.index_add_(0, axis, apart << bit)


def _pieces(planes: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=planes.device)[:, None]


def _of_planes(bits: Tensor, starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the axis and the bit index of each plane."""
    plane = torch.arange(count, device=bits.device)
    axis = torch.searchsorted(starts + bits, plane, right=True).clamp(max=len(bits) - 1)
    return axis, (plane - starts[axis]).clamp(0, 7).to(torch.uint8)[:, None]
