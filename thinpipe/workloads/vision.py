"""Public image data with MobileNetV2: cifar10, cifar100 and food101, with the recipe that pretrained weights take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.models.save import copied_files
from thinpipe.workloads.checkpoint import Weights
from thinpipe.workloads.hub import PublicData, class_numbers, columns_of, datasets_library, load_public, load_saved
from thinpipe.workloads.mobilenet import MOBILENET_MODULES, UNITS, mobilenet_bytes, new_mobilenet, pretrained_mobilenet
from thinpipe.workloads.options import positive, refuse_others
from thinpipe.workloads.pictures import framed_images, tiny_images
from thinpipe.workloads.splits import Images, at_most
from thinpipe.workloads.task import Data, DataError, Metric, Recipe, Shape, Source, Task

IMAGE_SIZE = 224
LEAST_SIZE = 32  # pixels that MobileNetV2's five strides need
CHECKPOINT = "google/mobilenet_v2_1.0_224"
RECIPE = Recipe(
    batch_size=256,
    chunks=8,
    epochs=40,
    optimizer="sgd",
    lr=0.01,
    lr_schedule="cosine",
    client_layers=(1, 1),
)


class MobileNetTask(Task):
    """What tasks with MobileNetV2 of any source share: options, size, model."""

    metric: Metric = "accuracy"
    recipe = RECIPE
    modules = MOBILENET_MODULES
    checkpoint: str | None = CHECKPOINT

    def check(self, source: Source) -> Weights | None:
        """The checkpoint to start from, or None; ValueError for options that make no sense."""
        refuse_others(self.name, source, ("data", "weights", "image_size", "width", "samples"))
        return Weights.of(source, task=self.name, kind="mobilenet_v2", checkpoint=self.checkpoint)

    def look_for(self, source: Source) -> int:
        self.check(source)
        self.image_size(source)
        return UNITS

    def image_size(self, source: Source) -> int:
        """Pixels both ways."""
        return positive("image_size", source.image_size, IMAGE_SIZE, least=LEAST_SIZE)

    def weight_bytes(self, source: Source) -> int:
        return 0 if self.check(source) is not None else mobilenet_bytes(1.0 if source.width is None else source.width)

    def build(self, shape: Shape, source: Source) -> nn.Module:
        """With the checkpoint's weights, or random ones."""
        weights = self.check(source)
        if weights is not None:
            return pretrained_mobilenet(shape, weights)
        return new_mobilenet(shape, 1.0 if source.width is None else source.width)

    def companions(self, source: Source) -> Mapping[str, bytes]:
        return {} if source.weights is None else copied_files(source.weights, ["preprocessor_config.json"])


@dataclass(frozen=True, kw_only=True)
class PublicImages(MobileNetTask):
    """A data set of the hub: pictures in one column, classes in another."""

    name: str
    summary: str
    data: PublicData
    picture: str
    label: str
    validation: str  # the split that has this part
    pixels: int | None = None  # of every picture, if all are tiny

    def look_for(self, source: Source) -> int:
        units = super().look_for(source)
        self._splits(source)
        return units

    def load(self, source: Source) -> tuple[Data, Shape]:
        """From ``source.data``, the hub's cache or the hub."""
        self.check(source)
        size = self.image_size(source)
        train, validation = (self._images(source, rows, size) for rows in self._splits(source))
        classes = int(torch.cat([train.labels, validation.labels]).max()) + 1
        data = Data(train=at_most(train, source.samples), validation=validation, classes=classes)
        return data, Shape(classes=classes, image_size=size)

    def _splits(self, source: Source) -> list[Any]:
        """The rows of both parts, which stay on disk."""
        names = ("train", self.validation)
        whole = load_saved(source.data, names, self.data.part) if source.data else load_public(self.name, self.data)
        for name in names:
            columns_of(source.data, self.data, whole[name], (self.picture, self.label))
        return [whole[name] for name in names]

    def _images(self, source: Source, rows: Any, size: int) -> Images:
        labels = class_numbers(source.data or self.data.repository, self.label, rows[self.label][:])
        files = partial(_files, rows.cast_column(self.picture, datasets_library().Image(decode=False)), self.picture)
        return tiny_images(files, labels, self.pixels, size) if self.pixels else framed_images(files, labels, size)


def _files(rows: Any, column: str, indices: Tensor) -> Sequence[bytes | str]:
    found = [each and (each["bytes"] or each["path"]) for each in rows[indices.tolist()][column]]
    for number, file in zip(indices.tolist(), found, strict=True):
        if not file:
            raise DataError(f"row {number} of the data set has no {column}; remove the row")
    return found


CIFAR10 = PublicImages(
    name="cifar10",
    summary="CIFAR-10, 60000 pictures of 10 kinds; MobileNetV2 from public weights, 224 pixels",
    data=PublicData(repository="uoft-cs/cifar10"),
    picture="img",
    label="label",
    validation="test",
    pixels=32,
)
CIFAR100 = PublicImages(
    name="cifar100",
    summary="CIFAR-100, 60000 pictures of 100 kinds; MobileNetV2 from public weights, 224 pixels",
    data=PublicData(repository="uoft-cs/cifar100"),
    picture="img",
    label="fine_label",
    validation="test",
    pixels=32,
)
FOOD101 = PublicImages(
    name="food101",
    summary="Food-101, 101000 pictures of 101 dishes; MobileNetV2 from public weights, 224 pixels",
    data=PublicData(repository="ethz/food101"),
    picture="image",
    label="label",
    validation="validation",
)
