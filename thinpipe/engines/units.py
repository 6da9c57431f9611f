"""A model as units that stages are made of: what each returns for one chunk, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinpipe.engines.shapes import Meta, Traced, meta_of, trace_units
from thinpipe.models.cut import CutModel
from thinpipe.models.units import cut_into_units
from thinpipe.options import OptionError
from thinpipe.pipeline.units import is_known, unit_names, units_of

Fill = Callable[[nn.Module, Iterable[str]], None]  # gives the parameters of these names their values


@dataclass(frozen=True, kw_only=True)
class Units:
    """A model's units in their order. Every worker finds the same by itself, whether it has the weights or not."""

    model: nn.Module
    units: list[nn.Module]
    names: tuple[str, ...]
    outputs: list[Traced] | None = None  # of each for one chunk; None: to be found out by running them
    fill: Fill | None = None  # None: the model has its weights

    def traced(self, inputs: Sequence[Meta], *, amp: bool, device: torch.device) -> list[Traced]:
        if self.outputs is None:
            return trace_units(self.units, inputs, amp=amp, device=device)
        return self.outputs

    def bring(self, device: torch.device) -> None:
        """What a model's code between units computes with, rotary frequencies for instance, goes where units are."""
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)

    def fill_own(self, modules: Iterable[nn.Module]) -> None:
        """Give the parameters of these modules their values, and no others; each under all of its names."""
        if self.fill is None:
            return
        mine = {id(parameter) for module in modules for parameter in module.parameters()}
        named = self.model.named_parameters(remove_duplicate=False)
        self.fill(self.model, [name for name, parameter in named if id(parameter) in mine])


def cut_model(model: nn.Module, inputs: Sequence[Meta], fill: Fill | None = None, *, amp: bool = False) -> Units:
    """Any model of transformers, by its own forward on a chunk of such inputs; others as ``units_of`` knows them."""
    if is_known(model) or not hasattr(model, "base_model_prefix"):
        units = units_of(model)
        return Units(model=model, units=units, names=unit_names(model, units), fill=fill)
    example = _example(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):  # for the types of what travels
        cut = CutModel(model, example)
        travelling = [meta_of(tensors) for tensors in cut.travelling(example)]
    check_private(type(model).__name__, cut.live)
    outputs = [Traced(metas, flops) for metas, flops in zip(travelling, cut.flops, strict=True)]
    return Units(model=model, units=list(cut_into_units(cut)), names=_names(cut), outputs=outputs, fill=fill)


def check_private(name: str, live: Sequence[Sequence[tuple[str, int, int]]]) -> None:
    """ValueError if inputs themselves are among what travels between units."""
    if any(kind == "input" for values in live for kind, _, _ in values):
        raise ValueError(
            f"{name} asks for its inputs behind its blocks, so tokens or images would travel to the servers: it is "
            "not cut, take another model"
        )


def check_shared(modules: Sequence[nn.Module], workers: int) -> None:
    """OptionError if two workers would train one parameter, each a copy of its own."""
    owner: dict[int, int] = {}
    for index, module in enumerate(modules):
        for parameter in module.parameters():
            if owner.setdefault(id(parameter), index % workers) != index % workers:
                raise OptionError(
                    "the model uses some weights in its first and in its last units (tied embeddings), so one worker "
                    "must have both: take {layout} client-server"
                )


def _example(inputs: Sequence[Meta]) -> Mapping[str, Tensor]:
    """Of transformers' models: images, or token ids and a mask."""
    if inputs[0].dtype.is_floating_point:
        return {"pixel_values": torch.zeros(inputs[0].shape)}
    names = ("input_ids", "attention_mask")
    return {name: torch.ones(meta.shape, dtype=meta.dtype) for name, meta in zip(names, inputs, strict=True)}


def _names(cut: CutModel) -> tuple[str, ...]:
    paths = {id(module): path for path, module in cut.model.named_modules()}
    prefix = getattr(cut.model, "base_model_prefix", "") + "."
    return ("embeddings", *(paths[id(block)].removeprefix(prefix) for block in cut.blocks), "head")
