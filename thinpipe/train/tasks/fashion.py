"""Fashion-MNIST, grey pictures of clothes, from the hub or from the four idx files that it was published as."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinpipe.system.files import check_regular, errors_named
from thinpipe.train.tasks.classifier import ImageFormat
from thinpipe.train.tasks.hub import PublicData
from thinpipe.train.tasks.pictures import tiny_images
from thinpipe.train.tasks.splits import Images, at_most
from thinpipe.train.tasks.task import Data, Shape, Source
from thinpipe.train.tasks.vision import DEFAULTS, PublicImages

CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
PIXELS, PADDED = 28, 32
FILES = {"train": "train", "test": "t10k"}  # split -> prefix of its file names
_WHAT = "an idx file of Fashion-MNIST"
_REMEDY = "bring the published one, as Debian's package dataset-fashion-mnist has it"


@dataclass(frozen=True, kw_only=True)
class FashionMnist(PublicImages):
    """28 x 28 grey pixels with a black border of two; from scratch: there are no public weights for images so small."""

    checkpoint = None
    usual_size = PADDED
    defaults = replace(DEFAULTS, batch_size=128, chunks=4, epochs=8, lr=0.05, warmup=0.1, weight_decay=5e-4)

    def preflight(self, source: Source) -> int | None:
        folder = _idx_folder(source.data)
        if folder is None:
            return super().preflight(source)
        for split in FILES:
            for file in _files(folder, split):
                _shape(file)
        return super(PublicImages, self).preflight(source)

    def load(self, source: Source) -> tuple[Data, Shape]:
        folder = _idx_folder(source.data)
        if folder is None:
            return super().load(source)
        made = self.checked_format(source)
        train, validation = (_idx_images(folder, split, made) for split in FILES)
        self.check_classes(source, train, len(CLASSES))
        data = Data(train=at_most(train, source.samples), validation=validation, classes=len(CLASSES))
        return data, Shape(classes=len(CLASSES), image_size=made.size, labels=CLASSES)

    def images(self, source: Source, rows: Any, made: ImageFormat) -> Images:
        found = super().images(source, rows, made)
        return tiny_images(lambda indices: _framed(found.read(indices)), found.labels, made.prepare)


FASHION_MNIST = FashionMnist(
    name="fashion-mnist",
    summary="Fashion-MNIST, 70000 grey pictures of 10 kinds of clothes; MobileNetV2 from scratch, 32 pixels",
    data=PublicData(repository="zalando-datasets/fashion_mnist"),
    picture="image",
    label="label",
    validation="test",
    pixels=PIXELS,
)


def _framed(images: Tensor) -> Tensor:
    return pad(images, ((PADDED - PIXELS) // 2,) * 4)


def _idx_folder(folder: Path | None) -> Path | None:
    """Return the folder if it holds idx files: it has none of the files of the hub's format."""
    if folder is None or not folder.is_dir() or (folder / "dataset_dict.json").is_file():
        return None
    return folder if next(folder.rglob("*.parquet"), None) is None else None


def _files(folder: Path, split: str) -> tuple[Path, Path]:
    """Return the files of images and of labels; plain or compressed."""
    found = []
    for name in (f"{FILES[split]}-images-idx3-ubyte", f"{FILES[split]}-labels-idx1-ubyte"):
        file = next((each for each in (folder / name, folder / f"{name}.gz") if each.exists()), None)
        if file is None:
            raise ValueError(
                f"{folder} has no {name} or {name}.gz; Fashion-MNIST is four such files, or a folder as on the hub: "
                f"{_REMEDY}"
            )
        found.append(file)
    return found[0], found[1]


def _idx_images(folder: Path, split: str, made: ImageFormat) -> Images:
    pictures, kinds = _files(folder, split)
    images, labels = _read(pictures).unsqueeze(1), _read(kinds).long()
    if len(images) != len(labels):
        raise ValueError(
            f"{kinds} has {len(labels)} labels, and {pictures.name} has {len(images)} images: they are not of one "
            f"set; {_REMEDY}"
        )
    if int(labels.max()) >= len(CLASSES):
        row = int((labels >= len(CLASSES)).nonzero()[0])
        raise ValueError(f"{kinds}: labels are 0 to {len(CLASSES) - 1}, and number {row} is {labels[row]}; {_REMEDY}")
    return tiny_images(lambda indices: _framed(images[indices]), labels, made.prepare)


def _shape(file: Path) -> tuple[int, ...]:
    """Return the shape in the header: two zeros, the type, the number of dimensions, then big-endian 32-bit sizes."""
    dimensions = 3 if "idx3" in file.name else 1
    check_regular(file, _WHAT, _REMEDY)
    with errors_named(file, _WHAT, _REMEDY), _open(file) as opened:
        header = opened.read(4 + 4 * dimensions)
    sizes = tuple(int.from_bytes(header[place : place + 4], "big") for place in range(4, len(header), 4))
    if header[:4] != bytes((0, 0, 8, dimensions)) or len(header) != 4 + 4 * dimensions:
        raise ValueError(f"{file} cannot be read as {_WHAT}: it begins with {header[:4].hex(' ')}; {_REMEDY}")
    if not sizes[0] or sizes[1:] not in ((), (PIXELS, PIXELS)):
        raise ValueError(
            f"{file} should have images of {PIXELS} x {PIXELS} pixels, at least one; it has {sizes}; {_REMEDY}"
        )
    return sizes


def _open(file: Path) -> Any:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


def _read(file: Path) -> Tensor:
    sizes = _shape(file)
    expected = math.prod(sizes)
    with errors_named(file, _WHAT, _REMEDY), _open(file) as opened:
        opened.read(4 + 4 * len(sizes))
        values = opened.read(expected + 1)  # limits what a damaged file can decompress to
    if len(values) != expected:
        there = "more" if len(values) > expected else f"only {len(values)}"
        raise ValueError(f"{file} should have {expected} bytes behind its header, and has {there}; {_REMEDY}")
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(sizes)
