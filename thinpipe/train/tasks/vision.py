"""Image classification: the common part of such tasks; cifar10, cifar100 and food101 with their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.train.models.function import FunctionModel
from thinpipe.train.models.pretrained import PretrainedModel
from thinpipe.train.models.save import copied_files
from thinpipe.train.tasks.classifier import (
    IMAGE_PROCESSOR,
    ClassifierTask,
    ImageFormat,
    check_images,
    image_format,
    ordered_names,
)
from thinpipe.train.tasks.hub import PublicData, class_names, class_numbers, datasets_library, public_splits
from thinpipe.train.tasks.mobilenet import (
    DROPOUT,
    MOBILENET_MODULES,
    UNITS,
    mobilenet_bytes,
    new_mobilenet,
    with_plain_statistics,
)
from thinpipe.train.tasks.pictures import framed_images, read_pictures, tiny_images
from thinpipe.train.tasks.sources import positive
from thinpipe.train.tasks.splits import Images, at_most
from thinpipe.train.tasks.task import Data, DataError, Metric, Shape, Source, TaskDefaults

IMAGE_SIZE = 224
LEAST_SIZE = 32  # pixels that MobileNetV2's five strides need
CHECKPOINT = "google/mobilenet_v2_1.0_224"
DEFAULTS = TaskDefaults(
    batch_size=256,
    chunks=8,
    epochs=40,
    optimizer="sgd",
    lr=0.01,
    lr_schedule="cosine",
    client_layers=(1, 1),
)


class ImageTask(ClassifierTask):
    """The common part of image classification: options, size, MobileNetV2 unless another model is named."""

    kind = "image"
    own_type = "mobilenet_v2"
    sizes = ("image_size",)
    metric: Metric = "accuracy"
    defaults = DEFAULTS
    modules = MOBILENET_MODULES
    checkpoint: str | None = CHECKPOINT
    usual_size = IMAGE_SIZE

    def own_units(self, source: Source) -> int:
        self.own_checkpoint(source)
        self.image_format(source)
        return UNITS

    def own_bytes(self, width: float) -> int:
        return mobilenet_bytes(width)

    def image_format(self, source: Source) -> ImageFormat:
        """Return the image format of the model."""
        model = self.model(source)
        if model is None:
            return ImageFormat(size=positive("image_size", source.image_size, self.usual_size, least=LEAST_SIZE))
        found = image_format(model)
        return replace(found, size=positive("image_size", source.image_size, found.size))

    def check_size(self, model: PretrainedModel, source: Source) -> None:
        check_images(model, self.image_format(source).size)

    def checked_format(self, source: Source) -> ImageFormat:
        """Return the image format after checking options, weights and the model's code, before samples are read."""
        self.check_options(source)
        model = self.model(source)
        if isinstance(model, PretrainedModel):
            model.check_cut()  # here, so that it is checked on several machines too
            self.check_size(model, source)
        return self.image_format(source)

    def check_classes(self, source: Source, images: Images, classes: int) -> None:
        """Raise ValueError if a user's function builds a model for other classes."""
        model = self.model(source)
        if isinstance(model, FunctionModel):
            model.check_classes(images.batch(torch.tensor([0, 0])).inputs, classes, self.kind)

    def own_model(self, shape: Shape, source: Source) -> nn.Module:
        weights = self.own_checkpoint(source)
        if weights is None:
            return new_mobilenet(shape, 1.0 if source.width is None else source.width)
        model = replace(weights, classes=shape.classes).with_weights()
        model.dropout = nn.Dropout(DROPOUT)
        return with_plain_statistics(model)

    def companions(self, source: Source) -> Mapping[str, bytes]:
        model = self.model(source)
        folder = model.folder if isinstance(model, PretrainedModel) else source.weights
        return {} if folder is None else copied_files(folder, [IMAGE_PROCESSOR])


@dataclass(frozen=True, kw_only=True)
class PublicImages(ImageTask):
    """A data set of the hub: pictures in one column, classes in another."""

    name: str
    summary: str
    data: PublicData
    picture: str
    label: str
    validation: str  # name of the split that validates
    pixels: int | None = None  # of every picture, if all are tiny

    def preflight(self, source: Source) -> int | None:
        units = super().preflight(source)
        self.splits(source)
        return units

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Load the data from ``source.data``, the hub's cache or the hub."""
        made = self.checked_format(source)
        splits = self.splits(source)
        train, validation = (self.images(source, rows, made) for rows in splits)
        classes = int(torch.cat([train.labels, validation.labels]).max()) + 1
        self.check_classes(source, train, classes)
        data = Data(train=at_most(train, source.samples), validation=validation, classes=classes)
        names = ordered_names(class_names(splits[0], self.label), classes)
        return data, Shape(classes=classes, image_size=made.size, labels=names)

    def splits(self, source: Source) -> list[Any]:
        """Return the rows of both parts, which stay on disk."""
        columns = (self.picture, self.label)
        return public_splits(self.name, self.data, source.data, ("train", self.validation), columns)

    def images(self, source: Source, rows: Any, made: ImageFormat) -> Images:
        labels = class_numbers(source.data or self.data.repository, self.label, rows[self.label][:])
        files = partial(_files, rows.cast_column(self.picture, datasets_library().Image(decode=False)), self.picture)
        if self.pixels is None:
            return framed_images(files, labels, made.size, made.prepare)
        pixels = self.pixels
        return tiny_images(lambda indices: read_pictures(files(indices), pixels), labels, made.prepare)


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
CIFAR100 = replace(
    CIFAR10,
    name="cifar100",
    summary="CIFAR-100, 60000 pictures of 100 kinds; MobileNetV2 from public weights, 224 pixels",
    data=PublicData(repository="uoft-cs/cifar100"),
    label="fine_label",
)
FOOD101 = PublicImages(
    name="food101",
    summary="Food-101, 101000 pictures of 101 dishes; MobileNetV2 from public weights, 224 pixels",
    data=PublicData(repository="ethz/food101"),
    picture="image",
    label="label",
    validation="validation",
)
