"""What a replica trains in the benchmark: a model with random weights, a batch of random data, a loss."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 1000
RESNET_DEPTHS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3]}
RESNEXTS = ("resnext50_32x4d", "resnext101_32x8d")
MODELS = (*RESNET_DEPTHS, *RESNEXTS, "mobilenetv2", "roberta-base")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one iteration computes."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor]  # of the model's output


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes of the data."""

    batch_size: int
    image_size: int  # pixels, both ways
    tokens: int  # of a text


def check_model(name: str) -> str:
    """The library that a model comes from, with its version; ValueError if it cannot be had."""
    if ":" in name:
        _load_function(name)
        return name
    if name not in MODELS:
        raise ValueError(f"--model is one of {', '.join(MODELS)}, or package.module:function; got {name!r}")
    if name in RESNEXTS and not has_torchvision():
        raise ValueError(
            f"{name} comes from torchvision, which does not import here: pip install torchvision, of the release that "
            f"fits torch {torch.__version__}; without it there are resnet50, resnet101, mobilenetv2, roberta-base"
        )
    library = "torchvision" if name.startswith("resne") and has_torchvision() else "transformers"
    return f"{library} {version(library)}"


def build(name: str, shapes: Shapes, *, dtype: torch.dtype, device: torch.device) -> Workload:
    """The same weights and data whenever it is called."""
    torch.manual_seed(0)
    with torch.device(device):
        if ":" in name:
            model, inputs, loss = _load_function(name)(shapes.batch_size)
            return Workload(model=model.to(device), inputs=tuple(x.to(device) for x in inputs), loss=loss)
        model = _model(name, shapes).to(dtype)
        labels = torch.randint(CLASSES, (shapes.batch_size,))
        if name == "roberta-base":
            tokens = torch.randint(3, 50_000, (shapes.batch_size, shapes.tokens))  # 0 to 2 have meanings of their own
            inputs = (tokens,)
        else:
            inputs = (torch.randn(shapes.batch_size, 3, shapes.image_size, shapes.image_size, dtype=dtype),)
    return Workload(model=model, inputs=inputs, loss=lambda logits: nn.functional.cross_entropy(logits.float(), labels))


def has_torchvision() -> bool:
    """Whether torchvision imports: beside a CPU build of torch its published builds raise RuntimeError instead."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        return False
    return True


def _model(name: str, shapes: Shapes) -> nn.Module:
    if name.startswith("resne") and has_torchvision():
        return getattr(importlib.import_module("torchvision.models"), name)(num_classes=CLASSES)
    transformers: Any = importlib.import_module("transformers")  # untyped: mypy misses arguments its configs do take
    if name in RESNET_DEPTHS:
        resnet = transformers.ResNetConfig(depths=RESNET_DEPTHS[name], num_labels=CLASSES)
        return _Logits(transformers.ResNetForImageClassification(resnet))
    if name == "mobilenetv2":
        mobilenet = transformers.MobileNetV2Config(image_size=shapes.image_size, num_labels=CLASSES)
        return _Logits(transformers.MobileNetV2ForImageClassification(mobilenet))
    roberta = transformers.RobertaConfig(
        vocab_size=50_265, max_position_embeddings=max(514, shapes.tokens + 2), type_vocab_size=1, num_labels=CLASSES
    )
    return _Logits(transformers.RobertaForSequenceClassification(roberta))


class _Logits(nn.Module):
    """A model of transformers that returns its scores alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).logits


def _load_function(name: str) -> Callable[[int], Any]:
    module, _, function = name.partition(":")
    rule = (
        f"--model package.module:function names a function of the batch size that returns a model, a tuple of its "
        f"inputs, and a function from its output to a loss; {name!r}"
    )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, so that a script beside the user is found
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{rule} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"{rule} is no function")
    return found
