"""Your own pictures: a folder with one folder per class."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.workloads.pictures import framed_images
from thinpipe.workloads.splits import Part, at_most, split_fifth
from thinpipe.workloads.task import Data, Shape, Source, Split
from thinpipe.workloads.vision import MobileNetTask

ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
VALIDATION_NAMES = ("val", "validation", "valid", "test")


class ImageFolders(MobileNetTask):
    """``DIR/CLASS/*.jpg``, of which every fifth validates; or ``DIR/train/CLASS`` beside ``DIR/val/CLASS``."""

    name = "images"
    summary = "your own pictures, --data DIR with a folder per class; MobileNetV2 from public weights, 224 pixels"

    def look_for(self, source: Source) -> int:
        _classes(_roots(_folder(source.data))[0])
        return super().look_for(source)

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Find the files and look at the start of each: one that is no picture is named now, not after an epoch."""
        train_root, validation_root = _roots(_folder(source.data))
        self.check(source)
        size = self.image_size(source)
        classes = _classes(train_root)
        train = _split(train_root, classes, size)
        validation: Split
        if validation_root is None:
            trains, validates = split_fifth(len(train))
            train, validation = Part(whole=train, indices=trains), Part(whole=train, indices=validates)
        else:
            _same_classes(validation_root, classes)
            validation = _split(validation_root, classes, size)
        data = Data(train=at_most(train, source.samples), validation=validation, classes=len(classes))
        return data, Shape(classes=len(classes), image_size=size)


def _folder(path: Path | None) -> Path:
    if path is None or not path.is_dir():
        got = "none was given" if path is None else f"{path} is no folder"
        raise ValueError(f"task images needs --data DIR, a folder with one folder of pictures per class; {got}")
    return path


def _roots(root: Path) -> tuple[Path, Path | None]:
    validation = next((root / name for name in VALIDATION_NAMES if (root / name).is_dir()), None)
    if (root / "train").is_dir() and validation is not None:
        return root / "train", validation
    return root, None


def _classes(root: Path) -> list[str]:
    classes = sorted(each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))
    if len(classes) < 2:
        raise ValueError(
            f"{root} should have a folder for each of two classes or more; it has {', '.join(classes) or 'no folder'}"
        )
    return classes


def _same_classes(root: Path, classes: list[str]) -> None:
    others = sorted(set(_classes(root)) - set(classes))
    if others:
        raise ValueError(f"{root} has classes that there is nothing to train with: {', '.join(others)}")


def _split(root: Path, classes: list[str], size: int) -> Split:
    found = {name: _pictures(root / name) for name in classes if (root / name).is_dir()}
    empty = [name for name, files in found.items() if not files]
    if empty:
        raise ValueError(f"no pictures in {', '.join(str(root / name) for name in empty)}; known are {_endings()}")
    files = [file for each in found.values() for file in each]
    for file in files:
        _check_start(file)
    labels = torch.tensor([classes.index(name) for name, each in found.items() for _ in each])
    return framed_images(partial(_chosen, files), labels, size, partial(_names, root, files))


def _pictures(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in ENDINGS)


def _check_start(file: Path) -> None:
    from PIL import Image

    try:
        Image.open(file).close()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error}; replace or remove it") from None


def _chosen(files: list[Path], indices: Tensor) -> list[Path]:
    return [files[index] for index in indices.tolist()]


def _names(root: Path, files: list[Path], indices: Tensor) -> list[str]:
    return [f"{file.relative_to(root)} {file.stat().st_size}" for file in _chosen(files, indices)]


def _endings() -> str:
    return " ".join(sorted(ENDINGS))
