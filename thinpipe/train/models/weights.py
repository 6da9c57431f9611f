"""Weights of a worker's own units, and of no others: from safetensors files, or drawn at random.

A model is built with its parameters on the meta device, which takes no memory; its buffers (rotary frequencies and the
like) are real. Then the parameters that the worker needs are filled. Random values depend only on the seed and on a
module's name, so a model has the same weights however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from thinpipe.codecs.rounding import rounding_key
from thinpipe.system.files import read_json

_PLAIN = re.compile(
    r"[\w.+-]{1,255}", re.ASCII
)  # a file name in the folder itself; may be a symbolic link, as in caches
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@contextmanager
def hollow() -> Iterator[None]:
    """Create parameters of modules built inside this context on the meta device."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # otherwise two modules share it and it was already moved
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def zeros_for_hollow(model: nn.Module) -> Iterator[None]:
    """Replace parameters on the meta device by expanded zeros, which take no memory, for code that reads values.

    Integer buffers are restored afterwards, since batch norms count their calls.
    """
    counts = [(each, each.clone()) for each in model.buffers() if _counts(each) and not each.is_meta]
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    zeros: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                filled = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                stand_in = zeros.setdefault(id(parameter), nn.Parameter(filled, requires_grad=False))
                replaced.append((module, name, parameter))
                module._parameters[name] = stand_in
    try:
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter
        for buffer, before in counts:
            buffer.copy_(before)


def empty(model: nn.Module, names: Iterable[str]) -> None:
    """Release these parameters: move them back to the meta device."""
    for name in names:
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        held = module._parameters.get(last)
        if held is not None:
            module._parameters[last] = nn.Parameter(held.to("meta"), requires_grad=held.requires_grad)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's folder; raise ValueError if there are none."""
    index = folder / _INDEX
    files = indexed_files(index) if index.is_file() else [folder / _SINGLE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"weights are read from safetensors files: {folder} has no {missing[0]}. Save the model again with "
            "save_pretrained, which writes them"
        )
    return files


def indexed_files(index: Path) -> list[Path]:
    """Return the files that an index of weights names; raise ValueError if one is not in its folder."""
    facts = read_json(index, "an index of weights")
    found = facts.get("weight_map") if isinstance(facts, dict) else None
    names = list(found.values()) if isinstance(found, dict) else []
    if not names:
        raise ValueError(f"{index} is no index of weights: weight_map should name files; bring the model's own")
    for name in names:
        if not isinstance(name, str) or not _PLAIN.fullmatch(name):
            raise ValueError(
                f"{index} is no index of weights: it names files of its own folder, got {ascii(name)[:60]}; bring the "
                "model's own"
            )
    return [index.parent / name for name in sorted(set(names))]


def load_weights(model: Any, folder: Path, wanted: Iterable[str], head_seed: int | None = None) -> None:
    """Fill these parameters and buffers of a transformers model on the meta device from a folder; read no others.

    Names and layouts that changed since the files were written are converted as the library does. With a seed, a
    classifier's head may be missing or have other classes, and is drawn at random.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        convert_and_load_state_dict_in_model,
        rename_source_key,
    )
    from transformers.modeling_utils import LoadStateDictConfig

    own = set(wanted)
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names = model.state_dict()

    def target(key: str) -> str:
        return str(rename_source_key(key, renamings, converters, model.base_model_prefix, names)[0])

    with ExitStack() as files:
        found: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
            for key in file.keys():  # noqa: SIM118, it is no dict
                if target(key) in own or key in own:
                    found[key] = file.get_slice(key)
        info, _ = convert_and_load_state_dict_in_model(
            model, found, LoadStateDictConfig(weight_mapping=[*renamings, *converters], dtype=model.dtype)
        )
    others = {name for name, *_ in info.mismatched_keys}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = {name for name in own & info.missing_keys - tied if not _counts(names[name])}
    anew = set() if head_seed is None else {name for name in others | missing if _is_of_head(model, name)}
    wrong = [f"{name} has another shape" for name in sorted(others - anew)]
    wrong += [f"{name}: {error}" for name, error in info.conversion_errors.items()]
    wrong += [f"{name} is missing" for name in sorted(missing - anew)]
    if wrong:
        raise ValueError(f"the weights in {folder} are not those of {type(model).__name__}: {wrong[0]}")
    if head_seed is not None and anew:
        random_weights(model, anew, head_seed)
    model.tie_weights()


def _counts(tensor: torch.Tensor) -> bool:
    """Return True for an integer buffer, such as positions or a step count, which older files lack."""
    return not tensor.dtype.is_floating_point


def _is_of_head(model: Any, name: str) -> bool:
    """Return True if a tensor is outside the base model or in its pooler."""
    base = f"{model.base_model_prefix}."
    return not name.startswith(base) or name.removeprefix(base).startswith("pooler.")


def random_weights(model: Any, wanted: Iterable[str], seed: int) -> None:
    """Draw these parameters of a model on the meta device as its own code does, each module's from its own seed."""
    own = set(wanted)
    for path, module in model.named_modules():
        mine = [name for name in module._parameters if f"{path}.{name}".removeprefix(".") in own]
        if not mine:
            continue
        for name in mine:
            empty = module._parameters[name]
            if empty is not None and empty.is_meta:
                filled = nn.Parameter(torch.zeros(empty.shape, dtype=empty.dtype), requires_grad=empty.requires_grad)
                module._parameters[name] = filled
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rounding_key(seed, *path.encode()))
            reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
            if reset is not None and all(p is None or not p.is_meta for p in module._parameters.values()):
                reset()
            model._init_weights(module)
    model.tie_weights()
