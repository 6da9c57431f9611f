"""Whether a cut model computes what the uncut one does: logits and all gradients, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from thinpipe.models.blocks import UncuttableError
from thinpipe.models.cut import CutModel
from thinpipe.models.forward import run_until
from thinpipe.models.units import cut_into_units


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The largest differences, and where they begin."""

    blocks: int
    logits: float
    gradients: float
    first_difference: str | None  # the unit, in words
    needs_weights_elsewhere: str | None  # why a worker with one block alone could not compute it; None: it can

    @property
    def is_exact(self) -> bool:
        return self.logits == 0 and self.gradients == 0 and self.first_difference is None


def compare(model: nn.Module, inputs: Mapping[str, Tensor], alone: int | None = None) -> Comparison:
    """Run the model whole and in units, and so many blocks alone (None: all). UncuttableError if it cannot be cut."""
    unused = copy.deepcopy(model)  # some keep tensors of their last run
    cut = CutModel(model, inputs)
    wanted, seen = _run_whole(cut, inputs)
    gradients = _gradients(model, wanted)
    values: tuple[Tensor, ...] = tuple(inputs.values())
    first, given = None, []
    for number, unit in enumerate(cut_into_units(cut)):
        given.append(tuple(value.clone() for value in values))  # blocks may change what they are given
        output = unit(*values, **_asked(unit, inputs))
        values = output if isinstance(output, tuple) else (output,)
        if first is None and number < len(cut.blocks) and not _equal(cut, number, values, inputs, seen[number]):
            first = f"block {number} is called with other values"
    found = _gradients(model, values[0])
    return Comparison(
        blocks=len(cut.blocks),
        logits=_difference(wanted, values[0]),
        gradients=max(
            (_difference(gradients.get(name), found.get(name)) for name in gradients.keys() | found.keys()), default=0.0
        ),
        first_difference=first,
        needs_weights_elsewhere=_run_alone(unused, inputs, given, alone),
    )


def _run_whole(cut: CutModel, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[int, list[Any]]]:
    """The logits of the uncut model, and what it calls its blocks with."""
    seen: dict[int, list[Any]] = {}

    def on_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen[number] = pytree.tree_leaves((args, kwargs))
        return type(cut.blocks[number]).forward(cut.blocks[number], *args, **kwargs)

    return run_until(cut.model, cut.blocks, inputs, on_call, None), seen


def _asked(unit: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: inputs[name] for name in unit.asks}


def _equal(
    cut: CutModel, number: int, values: tuple[Tensor, ...], inputs: Mapping[str, Tensor], seen: list[Any]
) -> bool:
    """Whether a block would be called with what the uncut model calls it with, in every leaf."""
    unit = cut_into_units(cut)[number + 1]
    known, shared = unit.split(number, values, inputs)
    leaves = pytree.tree_leaves(cut.trace(shared).calls[number].filled(known))
    return len(leaves) == len(seen) and all(map(_same, leaves, seen))


def _same(here: Any, there: Any) -> bool:
    if isinstance(here, Tensor) and isinstance(there, Tensor):
        return torch.equal(here, there)
    # Other objects, an empty cache for instance, are made anew for every run.
    return type(here) is type(there) and (not isinstance(here, bool | int | float | str) or here == there)


def _gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    if not logits.requires_grad:
        raise UncuttableError("gradients do not flow from the logits through the units: blocks make their own")
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(logits.float().square().mean(), list(weights.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(weights, found, strict=True) if gradient is not None}


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return float("inf")
    if one.shape != other.shape:
        return float("inf")
    return float((one.detach().double() - other.detach().double()).abs().max()) if one.numel() else 0.0


def _run_alone(
    model: nn.Module, inputs: Mapping[str, Tensor], given: list[tuple[Tensor, ...]], count: int | None
) -> str | None:
    """Run one block after the other with all other weights gone, as on a worker that has its unit alone.

    With a ``count`` the first blocks and the last ones, in turns: these differ if any do.
    """
    blocks = range(len(given) - 2)
    for number in sorted(blocks, key=lambda number: min(number, len(blocks) - 1 - number))[:count]:
        alone = copy.deepcopy(model)
        cut = CutModel(alone, inputs)
        unit, values = cut_into_units(cut)[number + 1], given[number + 1]
        drop_weights(alone, {id(parameter) for parameter in unit.parameters()})
        try:
            found = unit(*values, **_asked(unit, inputs))
        except Exception as error:
            return f"block {number} alone: {error}"
        if not all(map(torch.equal, found, given[number + 2])):
            return f"block {number} alone: other values"
    return None


def drop_weights(model: nn.Module, kept: set[int]) -> None:
    """Move all parameters to the meta device but for those of these ids."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
