"""Adapters that peft saved, loaded into a model for evaluation or generation.

Rejected before a tensor is read: other kinds of adapters, whose layers compute something else; a file whose tensors do
not match, by name and shape, those that the config implies for the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from thinpipe.options import OptionError
from thinpipe.system.files import check_regular
from thinpipe.system.sanitize import first_line
from thinpipe.train.models.adapters import (
    ADAPTER_FILE,
    MOST_RANK,
    Adapted,
    adapter_layers,
    adapter_names,
    exported_names,
    heads_of,
    inject,
    is_on_meta,
    load_adapters,
    open_adapters,
    saved_name,
)
from thinpipe.train.models.blocks import candidates
from thinpipe.train.models.description import read_object
from thinpipe.train.models.function import is_function_name
from thinpipe.train.models.pretrained import ADAPTER, has_tokenizer
from thinpipe.train.models.remote import remote_folder

_DESCRIPTION = "the description of adapters"
# Fields of a config: those that define the computation, which are passed to peft; and those that do not affect it.
_USED = (
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
)
_UNUSED = (
    *("peft_type", "peft_version", "task_type", "auto_mapping", "inference_mode"),
    *("base_model_name_or_path", "revision", "init_lora_weights", "modules_to_save"),
)
# Initializations that leave the model's own weights unchanged.
_DRAWN = (True, False, None, "gaussian", "orthogonal", "eva")
_MERGE = "merge them into the model with peft (merge_and_unload), and take that"
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class SavedAdapter:
    """A folder that peft's ``save_pretrained`` wrote, or an export; ValueError for others."""

    folder: Path

    def completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a command's options with the adapters' base model and tokenizer filled in, unless others are named."""
        found = dict(given)
        if found.get("model") is None:
            found["model"] = self._base()
        if found.get("tokenizer") is None and has_tokenizer(self.folder):
            found["tokenizer"] = str(self.folder)
        return found

    def digest(self) -> str:
        """Return a hash of these adapters: all workers must have the same ones."""
        self._facts()
        remote = remote_folder(self.folder)
        if remote is not None:
            return str(remote.digest)
        with open_adapters(self._file), self._file.open("rb") as file:  # validate the sizes before hashing
            return hashlib.file_digest(file, "sha256").hexdigest()

    def put_on(self, model: nn.Module, *, with_head: bool = True) -> Adapted:
        """Insert the adapter layers in place; on the meta device if the model is there: see ``Adapted.loader``.

        ``with_head``: the model already has a classifier's head for its final number of classes.
        """
        if not hasattr(model, "base_model_prefix"):
            raise OptionError(
                f"{{adapter}} is for models of transformers, and this is a {type(model).__name__}: leave it out"
            )
        config = self._config(model)
        heads, config.modules_to_save = config.modules_to_save, None
        try:
            inject(model, config)
        except Exception as error:  # peft does not validate all values and may raise anything
            raise OptionError(self._unfit(model, first_line(error))) from None
        config.modules_to_save = heads  # set only now: earlier, peft would replace the heads by copies
        self._check_tensors(model, with_head=with_head)
        if not is_on_meta(model):
            load_adapters(model, exported_names(model), self._file)
        return Adapted(model, config, seed=0, saved=self._file)

    @property
    def _file(self) -> Path:
        return self.folder / ADAPTER_FILE

    def _facts(self) -> dict[str, Any]:
        """Return the config; raise ValueError unless it is of plain LoRA and the tensor file is in the same folder."""
        from peft import LoraConfig

        file = self.folder / ADAPTER
        for each in (file, self._file):
            if not each.exists():
                raise OptionError(
                    f"{{adapter}} is a folder of adapters that peft, or {{export}}, wrote; {self.folder} has no "
                    f"{each.name}"
                )
            check_regular(each, "a part of adapters")
        facts = read_object(file, _DESCRIPTION, "bring the one that peft wrote")
        kind, usual = facts.get("peft_type"), LoraConfig()
        if kind != "LORA":
            raise OptionError(f"{{adapter}} takes adapters of LoRA; {file} describes {kind!r}: take the merged model")
        others = {
            name: value
            for name, value in facts.items()
            if name not in _USED + _UNUSED and value and value != getattr(usual, name, None)
        }
        if facts.get("init_lora_weights") not in _DRAWN:
            others["init_lora_weights"] = facts["init_lora_weights"]  # changed the model's own weights too
        if others:
            name, value = next(iter(others.items()))
            raise OptionError(
                f"{{adapter}} takes plain adapters of LoRA; those of {file} have {name} {str(value)[:40]}: {_MERGE}"
            )
        rank = facts.get("r")
        if type(rank) is not int or not 1 <= rank <= MOST_RANK:
            raise ValueError(f"{file}: r, the rank of adapters, is from 1 to {MOST_RANK}; got {rank!r}")
        return facts

    def _config(self, model: nn.Module) -> Any:
        """Return peft's config; of the fully saved modules, only those that the model has."""
        from peft import LoraConfig

        facts = self._facts()
        heads, saved = heads_of(model), facts.get("modules_to_save") or ()
        if not isinstance(saved, list | tuple) or not all(isinstance(name, str) for name in saved):
            raise ValueError(f"{self.folder / ADAPTER}: modules_to_save are names; got {saved!r}")
        # peft lists all names that classifier heads have.
        ends = tuple(f".{name}" for name in saved if name not in heads)
        unknown = [path for path, _ in model.named_modules() if ends and f".{path}".endswith(ends)]
        if unknown:
            raise OptionError(
                f"{{adapter}} takes adapters, and the head of a classifier; {self.folder} has all of {unknown[0]} too "
                f"(modules_to_save): {_MERGE}"
            )
        heads = [name for name in heads if name in saved]
        given = {name: facts[name] for name in _USED if facts.get(name) is not None}
        if heads and not isinstance(given.get("exclude_modules"), str):
            inside = tuple(f"{name}." for name in heads)
            within = [path for path, _ in model.named_modules() if f"{path}.".startswith(inside)]
            given["exclude_modules"] = [*given.get("exclude_modules", ()), *within]  # as peft does
        try:
            return LoraConfig(**given, modules_to_save=heads or None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.folder / ADAPTER} cannot be read as {_DESCRIPTION}: {error}") from None

    def _check_tensors(self, model: nn.Module, *, with_head: bool) -> None:
        blocks = tuple(f"{path}." for path in candidates(model))
        outside = [path for path in adapter_layers(model) if not path.startswith(blocks)]
        if outside:
            raise OptionError(
                f"{{adapter}} takes adapters on the blocks of a model; {self.folder} has one on {outside[0]}: {_MERGE}"
            )
        adapters, held = set(adapter_names(model)), dict(model.named_parameters())
        wanted = {saved_name(name): name for name in exported_names(model)}
        with open_adapters(self._file) as saved:
            there = {name: saved.get_slice(name) for name in saved.keys()}  # noqa: SIM118, it is no dict
            problems = [f"{name} is missing in its file" for name in wanted if name not in there]
            problems += [f"the model has no place for {name}" for name in there if name not in wanted]
            for name in wanted.keys() & there.keys() if not problems else ():
                shape, has = list(held[wanted[name]].shape), there[name].get_shape()
                if has != shape and (with_head or wanted[name] in adapters):
                    problems.append(f"{name} is {has}, and {shape} would fit")
                elif there[name].get_dtype() not in _FLOATS:
                    problems.append(f"{name} has no floats, it is {there[name].get_dtype()}")
        if problems:
            raise OptionError(self._unfit(model, sorted(problems)[0]))

    def _unfit(self, model: nn.Module, problem: str) -> str:
        return (
            f"the adapters in {self.folder} do not fit {type(model).__name__}: {problem}; name the model that they "
            "were made for with {model}"
        )

    def _base(self) -> str:
        """Return the model that the config names, if it is a local folder or may be a name of the hub."""
        facts = self._facts()
        name, revision = facts.get("base_model_name_or_path"), facts.get("revision")
        remedy = "name the model with {model}"
        if not isinstance(name, str) or not name:
            raise OptionError(f"{self.folder} does not name the model that its adapters are for: {remedy}")
        if Path(name).is_dir():
            return str(Path(name).resolve())
        # A function must be named by the user: a folder from elsewhere runs no code here.
        if Path(name).is_absolute() or is_function_name(name):
            raise OptionError(f"the adapters in {self.folder} are for {name}, which is no folder here: {remedy}")
        if revision not in (None, "main"):
            raise OptionError(f"the adapters in {self.folder} are for {name} as of {revision}: get that, and {remedy}")
        return name
