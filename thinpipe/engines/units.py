"""A model as units that stages are made of: what each returns for one chunk, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from thinpipe.engines.loss import Deferred
from thinpipe.engines.shapes import Meta, Traced, meta_of, trace_units
from thinpipe.models.cut import CutModel
from thinpipe.models.units import Tail, cut_into_units
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
    tail: Tail | None = None  # of a language model whose last unit leaves logits to the loss

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
        known = units_of(model)
        return Units(model=model, units=known, names=unit_names(model, known), fill=fill)
    example = _example(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):  # for the types of what travels
        cut = CutModel(model, example)
        travelling = [meta_of(tensors) for tensors in cut.travelling(example)]
    check_private(type(model).__name__, cut.live)
    *units, tail = cut_into_units(cut)
    deferred = _deferred(tail, travelling[-2], len(example["input_ids"]) if "input_ids" in example else None)
    if deferred is not None:
        travelling[-1] = travelling[-2]
    return Units(
        model=model,
        units=[*units, deferred or tail],
        names=_names(cut),
        outputs=[Traced(metas, flops) for metas, flops in zip(travelling, cut.flops, strict=True)],
        fill=fill,
        tail=None if deferred is None else deferred.tail,
    )


def _deferred(tail: nn.Module, metas: Sequence[Meta], samples: int | None) -> Deferred | None:
    """The last unit, without its logits, of a model that can be told which ones are wanted."""
    assert isinstance(tail, Tail)
    of_all = all(meta.shape[:1] == (samples,) for meta in metas)  # nothing that chunks share
    return Deferred(tail) if tail.cut.takes_positions and of_all else None


def cut(model: nn.Module | Sequence[nn.Module], inputs: Mapping[str, Tensor] | None = None) -> list[nn.Module]:
    """A model as units, for stages of your own: each takes what the one before it returns, the first one the inputs.

    Of a list its modules, of an ``nn.Sequential`` its children. Of a model of transformers, which is cut by its own
    forward: what comes before its blocks, each block, what comes after; ``inputs`` are an example of what it is called
    with, by name, as in ``{"input_ids": ids, "attention_mask": mask}``. Units share their parameters with the model.
    """
    if isinstance(model, list | tuple | nn.Sequential):
        units = list(model)
        wrong = [type(unit).__name__ for unit in units if not isinstance(unit, nn.Module)]
        if wrong or not units:
            raise ValueError(f"units are modules, one or more; got {wrong[0] if wrong else 'none'}")
        return units
    if not hasattr(model, "base_model_prefix"):
        raise ValueError(
            "models that can be cut are those of transformers, nn.Sequential, and lists of modules; got "
            f"{type(model).__name__}"
        )
    if inputs is None:
        raise ValueError(f"{type(model).__name__} is cut by its forward: give an example of its inputs, by name")
    return list(cut_into_units(CutModel(cast(nn.Module, model), inputs)))


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
    """Of transformers' models: images; or token ids, with a mask where texts are padded."""
    if inputs[0].dtype.is_floating_point:
        return {"pixel_values": torch.zeros(inputs[0].shape)}
    names = ("input_ids", "attention_mask")
    return {name: torch.ones(meta.shape, dtype=meta.dtype) for name, meta in zip(names, inputs, strict=False)}


def _names(cut: CutModel) -> tuple[str, ...]:
    paths = {id(module): path for path, module in cut.model.named_modules()}
    prefix = getattr(cut.model, "base_model_prefix", "") + "."
    return ("embeddings", *(paths[id(block)].removeprefix(prefix) for block in cut.blocks), "head")
