"""Models as lists of units: the smallest pieces a model can be cut into, each a function of the previous output.

Units share their parameters with the model. Models are recognized by class name, which needs no import of their
library; the error of ``units_of(model)`` lists the known models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the units of a model: the children of an ``nn.Sequential``, for other models the result of ``KNOWN``."""
    if isinstance(model, nn.Sequential):
        return list(model)
    cut = KNOWN.get(type(model).__name__)
    if cut is None:
        raise ValueError(
            f"models that can be cut are nn.Sequential, {', '.join(KNOWN)}; got {type(model).__name__}. "
            f"Make it an nn.Sequential, or add a function to thinpipe.pipeline.units.KNOWN"
        )
    return cut(model)


def is_known(model: nn.Module) -> bool:
    """Return True if ``units_of`` can cut a model."""
    return isinstance(model, nn.Sequential) or type(model).__name__ in KNOWN


def unit_names(model: nn.Module, units: list[nn.Module]) -> tuple[str, ...]:
    """Return the path of each unit in its model (``encoder.layer.3``), or of the last module of a joined unit."""
    paths = {id(module): path for path, module in model.named_modules()}
    prefix = getattr(model, "base_model_prefix", "") + "."  # transformers models have all but the head under one prefix
    names = []
    for unit in units:
        known = [paths[id(each)] for each in (unit, *reversed(list(unit.children()))) if id(each) in paths]
        path = known[0].removeprefix(prefix) if known else ""
        names.append(path if path and not path.isdecimal() else type(unit).__name__)  # a bare number is not informative
    return tuple(names)


def mobilenet_v2(model: Any) -> list[nn.Module]:
    """Return first convolution; rest of the stem; 16 blocks; last 1x1 convolution; pool and classifier.

    At 224 px the first unit sends [N, 32, 112, 112], the last but one [N, 1280, 7, 7].
    """
    base = model.mobilenet_v2
    stem = base.conv_stem
    rest = [part for part in (stem.expand_1x1, stem.conv_3x3, stem.reduce_1x1) if part is not None]
    head = nn.Sequential(base.pooler, nn.Flatten(1), model.dropout, model.classifier)
    return [stem.first_conv, nn.Sequential(*rest), *base.layer, base.conv_1x1, head]


def resnet(model: Any) -> list[nn.Module]:
    """Return stem; every residual block; pool and classifier."""
    blocks = [layer for stage in model.resnet.encoder.stages for layer in stage.layers]
    return [model.resnet.embedder, *blocks, nn.Sequential(model.resnet.pooler, model.classifier)]


def roberta(model: Any) -> list[nn.Module]:
    """Return embeddings; every layer; classifier. Takes token ids and attention mask, sent along with the states."""
    base = model.roberta
    layers = [_RobertaLayer(layer) for layer in base.encoder.layer]
    return [_RobertaEmbeddings(base.embeddings), *layers, _RobertaHead(model.classifier)]


class _RobertaEmbeddings(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.embeddings(input_ids=input_ids), attention_mask


class _RobertaLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        # Additive attention mask: 0 for a token, the lowest number for padding.
        hidden = (1 - attention_mask[:, None, None, :]).to(states.dtype) * torch.finfo(states.dtype).min
        output = self.layer(states, hidden)
        return output[0] if isinstance(output, tuple) else output, attention_mask


class _RobertaHead(nn.Module):
    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.classifier(states)


KNOWN: dict[str, Callable[[Any], list[nn.Module]]] = {
    "MobileNetV2ForImageClassification": mobilenet_v2,
    "ResNetForImageClassification": resnet,
    "RobertaForSequenceClassification": roberta,
}
