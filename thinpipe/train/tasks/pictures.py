"""Image loading and augmentation: files decoded per batch, resized, normalised, cropped and flipped.

All randomness comes from a generator that the caller seeds: the same seed gives the same images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from os import PathLike, cpu_count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate, pad

from thinpipe.system.files import check_regular, errors_named
from thinpipe.train.tasks.splits import Images, Prepare
from thinpipe.train.tasks.task import DataError

MARGIN = 8 / 7  # factor of the decoded size over the model's: 256 pixels for 224
TINY_SHIFT = 4  # shift in pixels of CIFAR's 32: the usual augmentation
REMEDY = "replace or remove it"
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";"}  # final bytes of files of these formats
_TAIL_BYTES = 4096  # some programs pad a file with zeros


def framed_images(
    files: Callable[[Tensor], Sequence[Any]],
    labels: Tensor,
    size: int,
    prepare: Prepare,
    names: Callable[[Tensor], Sequence[str]] | None = None,
) -> Images:
    """Return a split of pictures of any size and shape; ``prepare`` converts squares of ``size`` to the model's format.

    Pictures are decoded, scaled and cropped to the central square of 8/7 of the size; training uses a random window of
    that with a random flip, validation its center.
    """
    frame = round(size * MARGIN)
    return Images(
        read=lambda indices: read_pictures(files(indices), frame),
        labels=labels,
        prepare=lambda images: prepare(_middle(images, size)),
        augment=lambda images, random: flip(crop_and_resize(images, size, random), random),
        names=names,
    )


def tiny_images(read: Callable[[Tensor], Tensor], labels: Tensor, prepare: Prepare) -> Images:
    """Return a split of pictures smaller than the model's input: shifted and flipped first, then enlarged."""
    return Images(
        read=read,
        labels=labels,
        prepare=prepare,
        augment=lambda images, random: flip(pad_and_crop(images, TINY_SHIFT, random), random),
    )


def read_pictures(files: Sequence[str | PathLike[str] | bytes], frame: int) -> Tensor:
    """Return pictures as bytes [N, 3, frame, frame]: scaled to fill the square, the longer side center-cropped."""
    with ThreadPoolExecutor(min(len(files), cpu_count() or 1)) as pool:  # decoding releases the GIL
        return torch.stack(list(pool.map(partial(_read, frame=frame), files)))


def _read(file: str | PathLike[str] | bytes, frame: int) -> Tensor:
    from PIL import Image, ImageOps

    path = None if isinstance(file, bytes) else Path(file)
    try:
        if path is not None:
            check_regular(path, "a picture", REMEDY)
        with (
            errors_named(path or "a file of the data set", "a picture", REMEDY),
            Image.open(BytesIO(file) if isinstance(file, bytes) else file) as picture,
        ):
            picture.draft("RGB", (frame, frame))  # JPEG can decode at a half or a quarter of its size
            square = ImageOps.fit(picture.convert("RGB"), (frame, frame), Image.Resampling.BILINEAR)
    except ValueError as error:
        raise DataError(str(error)) from None
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def check_picture(file: Path) -> None:
    """Raise ValueError if a file is not a picture, has too many pixels, or is truncated.

    Only its ends are read: the start has the dimensions, and nearly all truncated files lack the final bytes of their
    format. Files without them, and formats without such bytes, are decoded.
    """
    from PIL import Image

    check_regular(file, "a picture", REMEDY)
    with errors_named(file, "a picture", REMEDY), Image.open(file) as picture:  # rejects too many pixels
        end = _ENDS.get(picture.format or "")
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            tail = opened.read()
        if end is None or not tail.rstrip(b"\0").endswith(end):
            picture.load()


def _middle(images: Tensor, size: int) -> Tensor:
    edge = (images.shape[-1] - size) // 2  # 0 if the size is right already
    return images[..., edge : edge + size, edge : edge + size]


@dataclass(frozen=True, kw_only=True)
class Colours:
    """Normalization of red, green and blue values from 0 to 1: subtract ``mean``, divide by ``deviation``."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


HALF = Colours(mean=(0.5,) * 3, deviation=(0.5,) * 3)  # the training range of Google's MobileNetV2: -1 to 1


def to_model(images: Tensor, size: int, colours: Colours = HALF) -> Tensor:
    """Return images [N, 1 or 3, h, w], bytes or floats from 0 to 1, as normalised [N, 3, size, size]."""
    mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in (colours.mean, colours.deviation))
    return ((resized(images, size) - mean) / deviation).contiguous()


def resized(images: Tensor, size: int) -> Tensor:
    """Return images [N, C, h, w] as floats [N, C, size, size] from 0 to 1, resampled unless of that size."""
    floats = unit_floats(images)
    if floats.shape[-2:] == (size, size):
        return floats
    return interpolate(floats, size=(size, size), mode="bilinear", antialias=True)


def unit_floats(images: Tensor) -> Tensor:
    """Return bytes as floats from 0 to 1; floats unchanged."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def pad_and_crop(images: Tensor, padding: int, random: torch.Generator) -> Tensor:
    """Shift every image by up to ``padding`` pixels in both directions, filling with zeros."""
    count, _, height, width = images.shape
    padded = pad(images, (padding,) * 4)
    top, left = torch.randint(0, 2 * padding + 1, (2, count), generator=random)
    rows = (top[:, None] + torch.arange(height))[:, None, :, None]
    columns = (left[:, None] + torch.arange(width))[:, None, None, :]
    channels = torch.arange(images.shape[1])[None, :, None, None]
    return padded[torch.arange(count)[:, None, None, None], channels, rows, columns]


def flip(images: Tensor, random: torch.Generator) -> Tensor:
    """Flip each image left to right with probability 1/2."""
    flipped = torch.rand(len(images), generator=random) < 0.5
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)


def crop_and_resize(images: Tensor, size: int, random: torch.Generator, *, least: float = 0.35) -> Tensor:
    """Return a random square window of ``least`` to all of each image's area, resized to float [N, C, size, size].

    Windows have only a few more pixels than ``size``, so bilinear sampling needs no antialiasing filter.
    """
    count = len(images)
    side = (least + (1 - least) * torch.rand(count, generator=random)).sqrt()
    shift = (2 * torch.rand(2, count, generator=random) - 1) * (1 - side)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = side, side
    theta[:, :, 2] = shift.T
    grid = affine_grid(theta, [count, images.shape[1], size, size], align_corners=False)
    return grid_sample(unit_floats(images), grid, mode="bilinear", padding_mode="border", align_corners=False)
