"""The blocks of a model: the repeated layers between which it can be cut, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.train.models.forward import run_until, shapes_returned, without_values
from thinpipe.train.models.symbolic import SymbolicValueError, symbolic_like

SHARED = ("attention_mask", "position_ids")  # inputs that all workers may receive


class UncuttableError(ValueError):
    """A model that cannot be cut; the message names the place and the reason."""


def in_order(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[nn.Module]:
    """Return the blocks in the order in which the model calls them, each one time."""
    found = list(candidates(model).values())
    if not found:
        raise UncuttableError(f"{type(model).__name__} has no list of blocks that it could be cut between")
    order: list[int] = []
    device = device_of(inputs.values())

    def on_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        order.append(number)
        return shapes_returned(found[number], args, kwargs)

    hidden = {name: tensor if name in SHARED else symbolic_like(tensor, device) for name, tensor in inputs.items()}
    with without_values(device):
        try:
            run_until(model, found, hidden, on_call, None)
        except (SymbolicValueError, NotImplementedError):
            if not order:  # otherwise the code after the last block needs more values, and gets them later
                raise
    if not order:
        raise UncuttableError(f"{type(model).__name__} calls none of its blocks")
    if len(set(order)) < len(order):
        raise UncuttableError(f"{type(model).__name__} calls a block several times: its layers share their weights")
    blocks = [found[number] for number in order]
    owner: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            if owner.setdefault(id(parameter), number) != number:
                raise UncuttableError(
                    f"{type(model).__name__} shares weights between blocks {owner[id(parameter)]} and {number}"
                )
    return blocks


def device_of(tensors: Any) -> torch.device:
    return next(
        (tensor.device for tensor in tensors if isinstance(tensor, Tensor) and not tensor.is_meta), torch.device("cpu")
    )


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules that look like blocks, by name: list items of a class that the model names as a block.

    Modules inside another candidate are left out.
    """
    found = _layers_of_stages(model)
    if found:
        return found
    named = _named_classes(model)
    for path, holder in model.named_modules():
        if not isinstance(holder, nn.ModuleList | nn.Sequential) or any(path.startswith(f"{name}.") for name in found):
            continue
        for name, item in holder.named_children():
            kinds = {each.__name__ for each in type(item).__mro__}
            if type(item).__name__ in named or "GradientCheckpointingLayer" in kinds:
                found[f"{path}.{name}"] = item
    return found or _most_in_lists(model)


def _layers_of_stages(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of image models that are lists of stages, which are lists of layers."""
    found: dict[str, nn.Module] = {}
    for path, stage in model.named_modules():
        if type(stage).__name__.endswith("Stage"):
            lists = [
                {f"{path}.{name}.{number}": item for number, item in holder.named_children()}
                for name, holder in stage.named_children()
                if isinstance(holder, nn.ModuleList | nn.Sequential)
            ]
            longest: dict[str, nn.Module] = max(lists, key=len, default={})
            found |= longest
    return found


def _most_in_lists(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the most frequent class in module lists, for models that name no block classes."""
    found: dict[type, dict[str, nn.Module]] = {}
    for path, holder in model.named_modules():
        for name, item in holder.named_children() if isinstance(holder, nn.ModuleList) else ():
            if not isinstance(item, nn.ModuleList):
                found.setdefault(type(item), {})[f"{path}.{name}"] = item
    return max(found.values(), key=len, default={})


def _named_classes(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        recorded: Any = getattr(module, "_can_record_outputs", None)
        states = recorded.get("hidden_states") if isinstance(recorded, dict) else None
        for each in states if isinstance(states, list | tuple) else [states]:
            kind = getattr(each, "target_class", each)
            if isinstance(kind, type):
                names.add(kind.__name__)
        names |= set(getattr(module, "_no_split_modules", None) or ())
    return names
