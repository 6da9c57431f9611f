"""Models whose units are known without a trace: an ``nn.Sequential``, and three architectures as paths of modules.

Built-in tasks and benchmarks use these three. A trace (``cut``) computes the same, bit for bit, but runs the model's
code with symbolic tensors for every chunk: measured on two cores, 3 ms more per chunk of ``digits``, which takes 8 ms,
and 4 ms more per chunk of ``grammar``, which takes 4 ms. It also has two units fewer of MobileNetV2.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# Class name -> units in order: the paths of the modules that a unit calls; "*" stands for all items of a list, each a
# unit of its own. MobileNetV2 at 224 pixels sends [N, 32, 112, 112] after the first unit, [N, 1280, 7, 7] to the last.
_PATHS: dict[str, tuple[str, ...]] = {
    "MobileNetV2ForImageClassification": (
        "mobilenet_v2.conv_stem.first_conv",
        "mobilenet_v2.conv_stem.expand_1x1 mobilenet_v2.conv_stem.conv_3x3 mobilenet_v2.conv_stem.reduce_1x1",
        "mobilenet_v2.layer.*",
        "mobilenet_v2.conv_1x1",
        "mobilenet_v2.pooler flatten dropout classifier",
    ),
    "ResNetForImageClassification": ("resnet.embedder", "resnet.encoder.stages.*.layers.*", "resnet.pooler classifier"),
    "RobertaForSequenceClassification": ("roberta.embeddings", "roberta.encoder.layer.*", "classifier"),
}


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the units of an ``nn.Sequential``, its children, or of a model of a known class."""
    if isinstance(model, nn.Sequential):
        return list(model)
    name = type(model).__name__
    if name not in _PATHS:
        raise ValueError(
            f"models that can be cut are nn.Sequential, {', '.join(_PATHS)}; got {name}. Make it an nn.Sequential"
        )
    units = [
        modules[0] if len(modules) == 1 else nn.Sequential(*modules)
        for path in _PATHS[name]
        for modules in _modules(model, path)
    ]
    return [_MaskedUnit(unit) for unit in units] if name.startswith("Roberta") else units


def is_sequential(model: nn.Module) -> bool:
    """Return True if ``units_of`` can cut a model."""
    return isinstance(model, nn.Sequential) or type(model).__name__ in _PATHS


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


def _modules(model: Any, path: str) -> list[list[nn.Module]]:
    """Return the modules of each unit that a path describes; modules that this model does not have are left out."""
    if "*" not in path:
        called = [nn.Flatten(1) if each == "flatten" else attrgetter(each)(model) for each in path.split()]
        return [[each for each in called if each is not None]]
    before, _, after = path.partition(".*")
    return [
        modules for item in attrgetter(before)(model) for modules in (_modules(item, after[1:]) if after else [[item]])
    ]


class _MaskedUnit(nn.Module):
    """A module of RoBERTa that also passes on the attention mask, which its layers use."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._kind = type(module).__name__

    def forward(self, values: Tensor, mask: Tensor) -> Any:
        if self._kind.endswith("Head"):
            return self.module(values)
        if self._kind.endswith("Embeddings"):
            return self.module(input_ids=values), mask
        # Additive attention mask: 0 for a token, the lowest number for padding.
        hidden = (1 - mask[:, None, None, :]).to(values.dtype) * torch.finfo(values.dtype).min
        output = self.module(values, hidden)
        return output[0] if isinstance(output, tuple) else output, mask
