"""Images in torch, whole batches at a time: resizing, normalising, random crops and flips.

What is random comes from a generator that the caller seeds: the same seed gives the same images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate, pad


@dataclass(frozen=True, kw_only=True)
class Colours:
    """What is taken off red, green and blue from 0 to 1, and what the rest is divided by."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


HALF = Colours(mean=(0.5,) * 3, deviation=(0.5,) * 3)  # what Google's MobileNetV2 was trained with: -1 to 1


def to_model(images: Tensor, size: int, colours: Colours = HALF) -> Tensor:
    """Images [N, 1 or 3, h, w], bytes or floats from 0 to 1, as normalised [N, 3, size, size]."""
    mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in (colours.mean, colours.deviation))
    return ((resized(images, size) - mean) / deviation).contiguous()


def resized(images: Tensor, size: int) -> Tensor:
    """Images [N, C, h, w] as [N, C, size, size], floats from 0 to 1; those of that size are not touched."""
    floats = unit_floats(images)
    if floats.shape[-2:] == (size, size):
        return floats
    return interpolate(floats, size=(size, size), mode="bilinear", antialias=True)


def unit_floats(images: Tensor) -> Tensor:
    """Bytes as floats from 0 to 1; floats as they are."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def pad_and_crop(images: Tensor, padding: int, random: torch.Generator) -> Tensor:
    """Every image moved by up to ``padding`` pixels both ways; what comes in from outside is zero."""
    count, _, height, width = images.shape
    padded = pad(images, (padding,) * 4)
    top, left = torch.randint(0, 2 * padding + 1, (2, count), generator=random)
    rows = (top[:, None] + torch.arange(height))[:, None, :, None]
    columns = (left[:, None] + torch.arange(width))[:, None, None, :]
    channels = torch.arange(images.shape[1])[None, :, None, None]
    return padded[torch.arange(count)[:, None, None, None], channels, rows, columns]


def flip(images: Tensor, random: torch.Generator) -> Tensor:
    """Every other image or so, left to right."""
    flipped = torch.rand(len(images), generator=random) < 0.5
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)


def crop_and_resize(images: Tensor, size: int, random: torch.Generator, *, least: float = 0.35) -> Tensor:
    """A square window of ``least`` to all of each image's area, anywhere in it, as float [N, C, size, size].

    Windows hold more pixels than ``size`` only by a little, so bilinear sampling needs no filter against aliasing.
    """
    count = len(images)
    side = (least + (1 - least) * torch.rand(count, generator=random)).sqrt()
    shift = (2 * torch.rand(2, count, generator=random) - 1) * (1 - side)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = side, side
    theta[:, :, 2] = shift.T
    grid = affine_grid(theta, [count, images.shape[1], size, size], align_corners=False)
    return grid_sample(unit_floats(images), grid, mode="bilinear", padding_mode="border", align_corners=False)
