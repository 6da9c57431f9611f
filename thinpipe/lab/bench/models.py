"""Models of the benchmarks, with random weights, a batch of random data, and a loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.lab.bench.inputs import WHAT, shared
from thinpipe.options import OptionError, between, check, option
from thinpipe.train.models.function import FunctionModel, import_function
from thinpipe.train.tasks.mobilenet import mobilenet_bytes, new_mobilenet
from thinpipe.train.tasks.roberta import BASE, Size, new_roberta, roberta_bytes
from thinpipe.train.tasks.sources import chosen_model
from thinpipe.train.tasks.task import Batch, Shape, Source

CLASSES = 1000
RESNET_DEPTHS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3]}
RESNEXTS = ("resnext50_32x4d", "resnext101_32x8d")
MODELS = (*RESNET_DEPTHS, *RESNEXTS, "mobilenetv2", "roberta-base")
CUTTABLE = ("mobilenetv2", *RESNET_DEPTHS, "roberta", "mlp")  # models that can be cut into stages

ROBERTA_VOCABULARY, ROBERTA_POSITIONS = 50_265, 514  # of the published model
MLP_HIDDEN, MLP_LAYERS, MLP_CLASSES = 1024, 4, 10


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model, inputs and loss of one iteration."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor]  # of the model's output


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes of the data, and of models with a configurable size."""

    batch_size: int = shared("batch_size", default=32)
    image_size: int = option(
        "Width and height of images.", panel=WHAT, metavar="PIXELS", rule=between(32, 1_000_000), default=224
    )
    width: float = option(
        "Channels of models of images, published = 1.", panel=WHAT, metavar="X", rule=between(0.05, 1000), default=1.0
    )
    tokens: int = option("Length of texts.", panel=WHAT, metavar="N", rule=between(1, 1_000_000), default=128)
    hidden: int | None = option(
        "Hidden size of roberta and mlp.",
        panel=WHAT,
        metavar="N",
        default_text=f"{BASE.states}; mlp {MLP_HIDDEN}",
        rule=between(8, 1_000_000),
        default=None,
    )
    layers: int | None = option(
        "Layers of roberta and mlp.",
        panel=WHAT,
        metavar="N",
        default_text=f"{BASE.layers}; mlp {MLP_LAYERS}",
        rule=between(1, 1_000_000),
        default=None,
    )

    def __post_init__(self) -> None:
        check(self)


def least_bytes(name: str, shapes: Shapes) -> int:
    """Return a lower bound on the bytes of weights and a batch, from the sizes alone; 0 for user models."""
    if ":" in name:
        return 0
    if name == "mlp":
        hidden, layers = shapes.hidden or MLP_HIDDEN, shapes.layers or MLP_LAYERS
        return 4 * hidden * (layers * hidden + shapes.batch_size)
    if name in ("roberta", "roberta-base"):
        weights = roberta_bytes(roberta_size(shapes), None)
        return weights + 16 * shapes.batch_size * shapes.tokens  # ids and mask
    # MobileNetV2 is the smallest of the image models.
    return mobilenet_bytes(shapes.width) + 12 * shapes.batch_size * shapes.image_size**2


def check_model(name: str) -> str:
    """Return the library of a model, with its version; raise ValueError if it is not available."""
    if ":" in name:
        _load_function(name)
        return name
    if name not in MODELS:
        raise OptionError(f"{{model}} is one of {', '.join(MODELS)}, or package.module:function; got {name!r}")
    if name in RESNEXTS and not has_torchvision():
        raise ValueError(
            f"{name} comes from torchvision, which does not import here: pip install torchvision, of the release that "
            f"fits torch {torch.__version__}; without it there are resnet50, resnet101, mobilenetv2, roberta-base"
        )
    library = "torchvision" if name.startswith("resne") and has_torchvision() else "transformers"
    return f"{library} {version(library)}"


def build(name: str, shapes: Shapes, *, dtype: torch.dtype, device: torch.device) -> Workload:
    """Return the model, inputs and loss; weights and data are the same in each call."""
    torch.manual_seed(0)
    with torch.device(device):
        if ":" in name:
            model, inputs, loss = _load_function(name)(shapes.batch_size)
            return Workload(model=model.to(device), inputs=tuple(x.to(device) for x in inputs), loss=loss)
        model = _model(name, shapes).to(dtype)
        labels = torch.randint(CLASSES, (shapes.batch_size,))
        if name == "roberta-base":
            inputs = (torch.randint(3, 50_000, (shapes.batch_size, shapes.tokens)),)  # 0 to 2 are special tokens
        else:
            inputs = (torch.randn(shapes.batch_size, 3, shapes.image_size, shapes.image_size, dtype=dtype),)
    return Workload(model=model, inputs=inputs, loss=lambda logits: nn.functional.cross_entropy(logits.float(), labels))


def has_torchvision() -> bool:
    """Return True if torchvision imports; its published builds raise RuntimeError with a CPU build of torch."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        return False
    return True


def build_cuttable(name: str, shapes: Shapes) -> tuple[nn.Module, Batch]:
    """Return a model of CUTTABLE and a batch, in host memory; the same in each call."""
    torch.manual_seed(0)
    batch = shapes.batch_size
    if name == "roberta":
        tokens = torch.randint(3, _vocabulary(shapes), (batch, shapes.tokens))
        inputs: tuple[Tensor, ...] = (tokens, torch.ones_like(tokens))
    elif name == "mlp":
        inputs = (torch.randn(batch, shapes.hidden or MLP_HIDDEN),)
    else:
        inputs = (torch.randn(batch, 3, shapes.image_size, shapes.image_size),)
    model = _mlp(shapes) if name == "mlp" else _classifier(name, shapes)
    labels = torch.randint(MLP_CLASSES if name == "mlp" else CLASSES, (batch,))
    return model, Batch(inputs=inputs, labels=labels)


def check_named(source: Source) -> None:
    """Raise ValueError unless the source names a causal language model that is available."""
    model = chosen_model(source, "causal")
    assert model is not None
    if isinstance(model, FunctionModel):
        model.function()
    else:
        model.config()


def build_named(source: Source, shapes: Shapes) -> tuple[nn.Module, Batch, Callable[..., None] | None]:
    """Return a user's causal language model, random tokens, and a function that initializes its weights.

    The function is None if the model already has weights.
    """
    torch.manual_seed(0)
    chosen = chosen_model(source, "causal")
    assert chosen is not None
    if isinstance(chosen, FunctionModel):
        model, load = chosen.build(), None
        vocabulary = chosen.vocabulary_of(model, shapes.tokens)
    else:
        model, load = chosen.init_on_meta(), chosen.weight_loader(pretrained=False, seed=0)
        vocabulary = chosen.vocabulary
    tokens = torch.randint(vocabulary, (shapes.batch_size, shapes.tokens + 1))
    return model, Batch(inputs=(tokens[:, :-1].contiguous(),), labels=tokens[:, 1:].contiguous()), load


def _model(name: str, shapes: Shapes) -> nn.Module:
    if name.startswith("resne") and has_torchvision():
        return getattr(importlib.import_module("torchvision.models"), name)(num_classes=CLASSES)
    return _Logits(_classifier(name, shapes))


def _classifier(name: str, shapes: Shapes) -> nn.Module:
    if name in RESNET_DEPTHS:
        return _resnet(name, shapes)
    if name == "mobilenetv2":
        return new_mobilenet(Shape(classes=CLASSES, image_size=shapes.image_size), shapes.width, small=False)
    shape = Shape(classes=CLASSES, tokens=shapes.tokens, vocabulary=_vocabulary(shapes))
    return new_roberta(shape, roberta_size(shapes))


def _resnet(name: str, shapes: Shapes) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")  # untyped: mypy does not know all config arguments
    resnet = transformers.ResNetConfig(depths=RESNET_DEPTHS[name], num_labels=CLASSES)
    resnet.embedding_size = round(resnet.embedding_size * shapes.width)
    resnet.hidden_sizes = [round(size * shapes.width) for size in resnet.hidden_sizes]
    return transformers.ResNetForImageClassification(resnet)


def roberta_size(shapes: Shapes) -> Size:
    """Return RoBERTa-base's size, or one with as many values per head; raise OptionError if heads do not fit."""
    hidden = shapes.hidden or BASE.states
    heads = max(1, hidden // (BASE.states // BASE.heads))
    if hidden % heads:
        raise OptionError(
            f"{{hidden}} is shared by {heads} heads, one for 64 values: {hidden} is no multiple of {heads}"
        )
    return replace(BASE, states=hidden, heads=heads, layers=shapes.layers or BASE.layers, positions=ROBERTA_POSITIONS)


def _vocabulary(shapes: Shapes) -> int:
    """Return RoBERTa's vocabulary size, scaled by the width: embeddings keep their share of the parameters."""
    return round(ROBERTA_VOCABULARY * (shapes.hidden or BASE.states) / BASE.states)


def _mlp(shapes: Shapes) -> nn.Sequential:
    """Return linear layers: the model with the most traffic per computation."""
    hidden = shapes.hidden or MLP_HIDDEN
    layers = [nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()) for _ in range(shapes.layers or MLP_LAYERS)]
    return nn.Sequential(*layers, nn.Linear(hidden, MLP_CLASSES))


class _Logits(nn.Module):
    """A model of transformers that returns only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).logits


def _load_function(name: str) -> Callable[[int], Any]:
    return import_function(
        name,
        "{model} package.module:function names a function of the batch size that returns a model, a tuple of its "
        "inputs, and a function from its output to a loss",
    )
