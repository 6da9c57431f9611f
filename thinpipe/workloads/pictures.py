"""Picture files to tensors: decoded when a batch asks for them, several at a time, all of one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from os import PathLike, cpu_count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinpipe.workloads.augment import crop_and_resize, flip, pad_and_crop, to_model
from thinpipe.workloads.splits import Images

MARGIN = 8 / 7  # a picture is read this much larger than the model sees it: 256 pixels for 224
TINY_SHIFT = 4  # pixels that CIFAR's 32 are moved: the usual recipe


def framed_images(
    files: Callable[[Tensor], Sequence[Any]],
    labels: Tensor,
    size: int,
    names: Callable[[Tensor], Sequence[str]] | None = None,
) -> Images:
    """Pictures of any size and shape.

    Read, scaled and cut to their middle square of 8/7 of the size; to train, a random window of that, flipped or not;
    to validate, its middle.
    """
    frame = round(size * MARGIN)
    return Images(
        read=lambda indices: read_pictures(files(indices), frame),
        labels=labels,
        prepare=partial(_middle, size=size),
        augment=partial(_window, size=size),
        names=names,
    )


def tiny_images(files: Callable[[Tensor], Sequence[Any]], labels: Tensor, pixels: int, size: int) -> Images:
    """Pictures that are smaller than the model's: moved and flipped as they are, then made larger."""
    return Images(
        read=lambda indices: read_pictures(files(indices), pixels),
        labels=labels,
        prepare=partial(to_model, size=size),
        augment=lambda images, random: flip(pad_and_crop(images, TINY_SHIFT, random), random),
    )


def read_pictures(files: Sequence[str | PathLike[str] | bytes], frame: int) -> Tensor:
    """Pictures as bytes [N, 3, frame, frame]: scaled to fill the square, the middle of what is longer."""
    with ThreadPoolExecutor(min(len(files), cpu_count() or 1)) as pool:  # decoding lets other threads run
        return torch.stack(list(pool.map(partial(_read, frame=frame), files)))


def _read(file: str | PathLike[str] | bytes, frame: int) -> Tensor:
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file) as picture:
            picture.draft("RGB", (frame, frame))  # JPEG can decode at a half or a quarter of its size
            square = ImageOps.fit(picture.convert("RGB"), (frame, frame), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError) as error:  # PIL raises SyntaxError for broken PNG
        name = "a picture of the data set" if isinstance(file, bytes) else file
        raise ValueError(f"cannot read {name}: {error}; replace or remove it") from None
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def _middle(images: Tensor, size: int) -> Tensor:
    edge = (images.shape[-1] - size) // 2  # 0 for what is of the size already
    return to_model(images[..., edge : edge + size, edge : edge + size], size)


def _window(images: Tensor, random: torch.Generator, *, size: int) -> Tensor:
    return flip(crop_and_resize(images, size, random), random)
