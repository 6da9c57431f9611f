"""Picture files to tensors: decoded when a batch asks for them, several at a time, all of one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from os import PathLike, cpu_count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinpipe.measure.files import check_regular, errors_named
from thinpipe.workloads.augment import crop_and_resize, flip, pad_and_crop
from thinpipe.workloads.splits import Images, Prepare
from thinpipe.workloads.task import DataError

MARGIN = 8 / 7  # a picture is read this much larger than the model sees it: 256 pixels for 224
TINY_SHIFT = 4  # pixels that CIFAR's 32 are moved: the usual recipe
REMEDY = "replace or remove it"
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";"}  # what files of these kinds end with
_TAIL_BYTES = 4096  # some programs fill a file up with zeros


def framed_images(
    files: Callable[[Tensor], Sequence[Any]],
    labels: Tensor,
    size: int,
    prepare: Prepare,
    names: Callable[[Tensor], Sequence[str]] | None = None,
) -> Images:
    """Pictures of any size and shape; ``prepare`` makes a model's images of squares of the size.

    Read, scaled and cut to their middle square of 8/7 of the size; to train, a random window of that, flipped or not;
    to validate, its middle.
    """
    frame = round(size * MARGIN)
    return Images(
        read=lambda indices: read_pictures(files(indices), frame),
        labels=labels,
        prepare=lambda images: prepare(_middle(images, size)),
        augment=partial(_window, size=size),
        names=names,
    )


def tiny_images(read: Callable[[Tensor], Tensor], labels: Tensor, prepare: Prepare) -> Images:
    """Pictures that are smaller than the model's: moved and flipped as they are, then made larger."""
    return Images(
        read=read,
        labels=labels,
        prepare=prepare,
        augment=lambda images, random: flip(pad_and_crop(images, TINY_SHIFT, random), random),
    )


def read_pictures(files: Sequence[str | PathLike[str] | bytes], frame: int) -> Tensor:
    """Pictures as bytes [N, 3, frame, frame]: scaled to fill the square, the middle of what is longer."""
    with ThreadPoolExecutor(min(len(files), cpu_count() or 1)) as pool:  # decoding lets other threads run
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
    """ValueError if a file is no picture, is too large for one, or breaks off.

    Only its ends are read: the start says how large it is, and nearly all that break off lack the bytes that their kind
    ends with. Those that do, and kinds without such bytes, are decoded.
    """
    from PIL import Image

    check_regular(file, "a picture", REMEDY)
    with errors_named(file, "a picture", REMEDY), Image.open(file) as picture:  # refuses what has too many pixels
        end = _ENDS.get(picture.format or "")
        if end is None or not _last_bytes(file).rstrip(b"\0").endswith(end):
            picture.load()


def _last_bytes(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        return opened.read()


def _middle(images: Tensor, size: int) -> Tensor:
    edge = (images.shape[-1] - size) // 2  # 0 for what is of the size already
    return images[..., edge : edge + size, edge : edge + size]


def _window(images: Tensor, random: torch.Generator, *, size: int) -> Tensor:
    return flip(crop_and_resize(images, size, random), random)
