"""scikit-learn's handwritten digits with a small MobileNetV2: embedded, and trained in about a minute on two cores."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from thinpipe.system.sizes import check_fits
from thinpipe.train.tasks.mobilenet import MOBILENET_MODULES, UNITS, mobilenet_bytes, new_mobilenet
from thinpipe.train.tasks.pictures import pad_and_crop, resized, to_model
from thinpipe.train.tasks.sources import positive, reject_unused_options
from thinpipe.train.tasks.splits import Images, Part, at_most, split_fifth
from thinpipe.train.tasks.task import Data, Shape, Source, Task, TaskDefaults

COUNT = 1797  # images
IMAGE_SIZE, WIDTH = 32, 0.35
LEAST_SIZE = 16  # pixels that MobileNetV2's four strides need
SHIFT = 1  # maximum shift, in pixels of 32: a quarter of an original pixel


class Digits(Task):
    """1797 images of 8 x 8 pixels, enlarged; every fifth validates."""

    name = "digits"
    summary = "scikit-learn's handwritten digits, embedded; small MobileNetV2 from scratch, 32 pixels"
    metric = "accuracy"
    defaults = TaskDefaults(
        batch_size=64,
        chunks=4,
        epochs=10,
        optimizer="sgd",
        lr=0.05,
        lr_schedule="cosine",
        warmup=0.1,
        client_layers=(1, 1),
    )

    modules = (*MOBILENET_MODULES, "sklearn.datasets")

    def preflight(self, source: Source) -> int:
        self._check(source)
        return UNITS

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Resize all images one time; random shifts of a pixel or two are applied to every batch."""
        size = self._check(source)
        images, labels = digits()
        images = resized(images, size)
        train, validation = split_fifth(len(labels))
        all_images = Images(
            read=images.__getitem__,
            labels=labels,
            prepare=partial(to_model, size=size),
            # No flip: a mirrored digit is not a digit.
            augment=lambda images, random: pad_and_crop(images, max(1, round(SHIFT * size / IMAGE_SIZE)), random),
        )
        data = Data(
            train=at_most(Part(whole=all_images, indices=train), source.samples),
            validation=Part(whole=all_images, indices=validation),
            classes=10,
        )
        return data, Shape(classes=10, image_size=size)

    def weight_bytes(self, source: Source) -> int:
        return mobilenet_bytes(WIDTH if source.width is None else source.width)

    def build(self, shape: Shape, source: Source) -> nn.Module:
        """Return a randomly initialized model, about a third as wide as the original."""
        self._check(source)
        return new_mobilenet(shape, WIDTH if source.width is None else source.width)

    def _check(self, source: Source) -> int:
        """Return the image size after validating all options."""
        reject_unused_options(
            self.name, source, ("image_size", "width", "samples"), "it is embedded and trained from scratch"
        )
        size = positive("image_size", source.image_size, IMAGE_SIZE, least=LEAST_SIZE)
        check_fits(f"{{image_size}} {size}: the data, {COUNT} images,", COUNT * 4 * size**2, "take a smaller one")
        return size


def digits() -> tuple[Tensor, Tensor]:
    """Return 1797 images [1, 8, 8] with values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
