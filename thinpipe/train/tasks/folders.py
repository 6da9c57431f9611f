"""Your own pictures: a folder with one folder per class."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from os import cpu_count, walk
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.options import OptionError
from thinpipe.system.files import errors_named
from thinpipe.train.tasks.classifier import ImageFormat
from thinpipe.train.tasks.pictures import check_picture, framed_images
from thinpipe.train.tasks.splits import Images, Part, at_most, split_fifth
from thinpipe.train.tasks.task import Data, Shape, Source, Split
from thinpipe.train.tasks.vision import ImageTask

ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
VALIDATION_NAMES = ("val", "validation", "valid", "test")


class ImageFolders(ImageTask):
    """``DIR/CLASS/*.jpg``, every fifth validates unless another folder is given; or ``DIR/{train,val}/CLASS``."""

    name = "images"
    summary = "your own pictures, {data} DIR with a folder per class; MobileNetV2 from public weights, or any {model}"

    places = ("data", "validation")

    def preflight(self, source: Source) -> int | None:
        train_root, validation_root = _roots(source)
        classes = _classes(train_root)
        if validation_root is not None:
            _same_classes(validation_root, classes)
        return super().preflight(source)

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Find the files and check both ends of each: an invalid picture is reported now, not after an epoch."""
        train_root, validation_root = _roots(source)
        made = self.checked_format(source)
        classes = _classes(train_root)
        found = _split(train_root, classes, made)
        self.check_classes(source, found, len(classes))
        train: Split = found
        validation: Split
        if validation_root is None:
            trains, validates = split_fifth(len(found))
            _some_of_each(train_root, classes, found.labels[trains])
            train, validation = Part(whole=found, indices=trains), Part(whole=found, indices=validates)
        else:
            _same_classes(validation_root, classes)
            validation = _split(validation_root, classes, made)
        data = Data(train=at_most(train, source.samples), validation=validation, classes=len(classes))
        return data, Shape(classes=len(classes), image_size=made.size, labels=tuple(classes))


def _folder(path: Path | None, option: str) -> Path:
    if path is None or not path.is_dir():
        got = "none was given" if path is None else f"{path} is no folder"
        raise OptionError(f"task images needs {{{option}}} DIR, a folder with one folder of pictures per class; {got}")
    return path


def _roots(source: Source) -> tuple[Path, Path | None]:
    """Return the folders of classes to train and to validate with; None: a part of the first validates."""
    root = _folder(source.data, "data")
    validation = next((root / name for name in VALIDATION_NAMES if (root / name).is_dir()), None)
    if (root / "train").is_dir() and validation is not None:
        root = root / "train"
    else:
        validation = None
    return root, validation if source.validation is None else _folder(source.validation, "validation")


def _classes(root: Path) -> list[str]:
    with errors_named(root, "a folder of classes", "make it readable, or name another"):
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


def _some_of_each(root: Path, classes: list[str], labels: Tensor) -> None:
    """Raise ValueError if holding out every fifth file for validation leaves a class without training pictures."""
    left_out = [name for number, name in enumerate(classes) if not (labels == number).any()]
    if left_out:
        raise ValueError(
            f"{root / left_out[0]} has a single picture, which validates as every fifth of all does, and none is left "
            f"to train with; add pictures, or bring folders train and val"
        )


def _split(root: Path, classes: list[str], made: ImageFormat) -> Images:
    found = {name: _pictures(root / name) for name in classes if (root / name).is_dir()}
    empty = ", ".join(str(root / name) for name, files in found.items() if not files)
    if empty:
        raise ValueError(f"no pictures in {empty}; known are {' '.join(sorted(ENDINGS))}")
    files = [file for each in found.values() for file in each]

    def names(indices: Tensor) -> list[str]:
        chosen = [files[index] for index in indices.tolist()]
        return [f"{file.relative_to(root)} {file.stat().st_size}" for file in chosen]

    with ThreadPoolExecutor(cpu_count() or 1) as pool:  # reading and decoding release the GIL
        for _ in pool.map(check_picture, files):
            pass
    labels = torch.tensor([classes.index(name) for name, each in found.items() for _ in each])
    return framed_images(
        lambda indices: [files[index] for index in indices.tolist()], labels, made.size, made.prepare, names
    )


def _pictures(folder: Path) -> list[Path]:
    """Return the pictures of a folder, by file name: an invalid picture is an error and is not skipped."""

    def refuse(error: OSError) -> None:  # rglob silently skips unreadable folders
        raise ValueError(f"{error.filename} cannot be read as a folder of pictures: {error.strerror}; make it readable")

    found = (Path(root) / name for root, folders, files in walk(folder, onerror=refuse) for name in (*folders, *files))
    return sorted(file for file in found if file.suffix.lower() in ENDINGS)
