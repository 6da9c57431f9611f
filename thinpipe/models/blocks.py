"""The blocks of a model: the repeated layers between which it can be cut, in the order in which they are called."""

from __future__ import annotations

from typing import Any

from torch import nn


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that look like blocks, by their names: items of lists, of a class that the model names as a block.

    Not those inside of others.
    """
    found = _layers_of_stages(model)
    if found:
        return found
    named = _named_classes(model)
    for path, holder in model.named_modules():
        if not isinstance(holder, nn.ModuleList | nn.Sequential) or any(path.startswith(f"{name}.") for name in found):
            continue
        for name, item in holder.named_children():
            if type(item).__name__ in named or _is_checkpointing(item):
                found[f"{path}.{name}"] = item
    return found or _longest_list(model)


def _layers_of_stages(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of models of images that are lists of stages, which are lists of layers."""
    found: dict[str, nn.Module] = {}
    for path, stage in model.named_modules():
        if type(stage).__name__.endswith("Stage"):
            lists = [
                {f"{path}.{name}.{number}": item for number, item in holder.named_children()}
                for name, holder in stage.named_children()
                if isinstance(holder, nn.ModuleList | nn.Sequential)
            ]
            found |= max(lists, key=len, default={})
    return found


def _longest_list(model: nn.Module) -> dict[str, nn.Module]:
    """The items of the longest list of modules of one class, for models that name no blocks."""
    lists = [
        {f"{path}.{name}": item for name, item in holder.named_children()}
        for path, holder in model.named_modules()
        if isinstance(holder, nn.ModuleList) and len({type(item) for item in holder}) == 1
    ]
    return max(lists, key=len, default={})


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


def _is_checkpointing(module: nn.Module) -> bool:
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
