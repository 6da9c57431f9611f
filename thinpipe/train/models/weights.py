"""Weights of a worker's own units, and of no others: from safetensors files, or drawn at random.

A model is built with its parameters on the meta device, which takes no memory; its buffers (rotary frequencies and the
like) are real. Then the parameters that the worker needs are loaded. Random values depend only on the seed and on a
module's name, so a model has the same weights however it is cut.

Private names used in this module, seen on transformers 5.17 and 5.22: ``conversion_mapping``, ``core_model_loading``,
``LoadStateDictConfig``, ``_init_weights``; of torch: a module's ``_parameters``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import nn

from thinpipe.codecs.rounding import rounding_key
from thinpipe.system.files import check_regular, errors_named, read_json
from thinpipe.train.models.remote import fetched

LoadWeights = Callable[[nn.Module, Iterable[str]], None]  # loads the values of the parameters of these names
BRING = "bring the model's own"  # remedy for an invalid file of a model's folder
_PLAIN = re.compile(r"[\w.+-]{1,255}", re.ASCII)  # a file in the folder itself; may be a symbolic link, as in caches
_INDEX, _SINGLE, _PICKLED = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"


@contextmanager
def params_on_meta() -> Iterator[None]:
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
def zeros_for_meta(model: nn.Module) -> Iterator[None]:
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


def release(model: nn.Module, names: Iterable[str]) -> None:
    """Move these parameters to the meta device."""
    for name in names:
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        held = module._parameters.get(last)
        if held is not None:
            set_parameter(module, last, held.to("meta"))


def set_parameter(module: nn.Module, name: str, values: torch.Tensor) -> None:
    """Replace a parameter of a module by one with these values; it remains frozen if it was."""
    before = module._parameters[name]
    assert before is not None
    module._parameters[name] = nn.Parameter(values, requires_grad=before.requires_grad)


def materialize(module: nn.Module, names: Iterable[str]) -> None:
    """Replace those of these parameters of a module that are on the meta device by zeros."""
    for name in names:
        held = module._parameters[name]
        if held is not None and held.is_meta:
            set_parameter(module, name, torch.zeros(held.shape, dtype=held.dtype))


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
        raise ValueError(f"{index} is no index of weights: weight_map should name files; {BRING}")
    for name in names:
        if not isinstance(name, str) or not _PLAIN.fullmatch(name):
            raise ValueError(
                f"{index} is no index of weights: it names files of its own folder, got {ascii(name)[:60]}; {BRING}"
            )
    return [index.parent / name for name in sorted(set(names))]


@contextmanager
def open_tensors(file: Path, what: str = "safetensors", remedy: str = BRING) -> Iterator[Any]:
    """Open a safetensors file, memory-mapped; raise ValueError if it is not readable as such."""
    check_regular(file, what, remedy)
    with ExitStack() as opened:
        with errors_named(file, what, remedy):
            tensors = opened.enter_context(safe_open(file, framework="pt"))
        yield tensors


def _stored(folder: Path, files: ExitStack) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of every tensor of a folder, and a function that returns it, not yet read."""
    pickled = folder / _PICKLED
    if pickled.exists() and not any(folder.glob("*.safetensors")):
        check_regular(pickled, "weights", BRING)
        with errors_named(pickled, "weights", BRING):
            # Files of before torch 1.6 are no zip files and cannot be mapped.
            tensors = torch.load(pickled, map_location="cpu", weights_only=True, mmap=is_zipfile(pickled))
        for name, tensor in tensors.items():
            yield name, partial(torch.Tensor.clone, tensor)
        return
    for path in weight_files(folder):
        file = files.enter_context(open_tensors(path))
        for name in file.keys():  # noqa: SIM118, it is no dict
            yield name, partial(file.get_slice, name)


def load_weights(model: Any, folder: Path, wanted: Iterable[str], draw_head: LoadWeights | None = None) -> None:
    """Load these parameters and buffers of a transformers model on the meta device from a folder; read no others.

    Names and layouts that changed since the files were written are converted as the library does. With ``draw_head``, a
    classifier's head may be missing or have other classes, and is drawn by it.
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

    @cache
    def target(key: str) -> str:
        return str(rename_source_key(key, renamings, converters, model.base_model_prefix, names)[0])

    def in_files(wanted: Collection[str]) -> Callable[[str], bool]:
        return lambda key: target(key) in wanted or key in wanted

    folder, is_own = fetched(folder, own, in_files), in_files(own)
    with ExitStack() as files:
        found = {key: read() for key, read in _stored(folder, files) if is_own(key)}
        info, _ = convert_and_load_state_dict_in_model(
            model, found, LoadStateDictConfig(weight_mapping=[*renamings, *converters], dtype=model.dtype)
        )
    others = {name for name, *_ in info.mismatched_keys}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = {name for name in own & info.missing_keys - tied if not _counts(names[name])}
    anew = set() if draw_head is None else {name for name in others | missing if _is_of_head(model, name)}
    wrong = [f"{name} has another shape" for name in sorted(others - anew)]
    wrong += [f"{name}: {error}" for name, error in info.conversion_errors.items()]
    wrong += [f"{name} is missing" for name in sorted(missing - anew)]
    if wrong:
        raise ValueError(f"the weights in {folder} are not those of {type(model).__name__}: {wrong[0]}; {BRING}")
    if draw_head is not None and anew:
        draw_head(model, anew)
    model.tie_weights()


def _counts(tensor: torch.Tensor) -> bool:
    """Return True for an integer buffer, such as positions or a step count, which older files lack."""
    return not tensor.dtype.is_floating_point


def _is_of_head(model: Any, name: str) -> bool:
    """Return True if a tensor is outside the base model or in its pooler."""
    base = f"{model.base_model_prefix}."
    return not name.startswith(base) or name.removeprefix(base).startswith("pooler.")


def random_weights(model: Any, wanted: Iterable[str], seed: int | None) -> None:
    """Draw these parameters of a model on the meta device as its own code does, each module's from its own seed.

    Without a seed, draw from torch's generator what ``from_pretrained`` would draw.
    """
    own = set(wanted)
    for path, module in model.named_modules():
        mine = [name for name in module._parameters if f"{path}.{name}".removeprefix(".") in own]
        if not mine:
            continue
        materialize(module, mine)
        with nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
            reset: Callable[[], None] | None = None
            if seed is not None:
                torch.manual_seed(rounding_key(seed, *path.encode()))
                reset = getattr(module, "reset_parameters", None)
            if reset is not None and all(p is None or not p.is_meta for p in module._parameters.values()):
                reset()
            model._init_weights(module)
    model.tie_weights()
