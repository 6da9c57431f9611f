"""Resolution of a source: the model that it names, for the tasks that train it; options not used are rejected.

A model is a folder, a name of the hub, a model type, or a user's own function.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from thinpipe.options import OptionError
from thinpipe.system.sizes import check_fits
from thinpipe.train.models.function import FunctionModel, is_function_name
from thinpipe.train.models.identity import folder_identity
from thinpipe.train.models.pretrained import PretrainedModel
from thinpipe.train.models.weights import LoadWeights
from thinpipe.train.tasks.hub import fetch_model
from thinpipe.train.tasks.mobilenet import with_plain_statistics
from thinpipe.train.tasks.task import Shape, Source, Task

# Fields of Source that ``chosen_model`` uses.
DESCRIBING_OPTIONS = ("model", "config", "config_set", "dtype", "attention", "trust_remote_code")
MODEL_OPTIONS = (*DESCRIBING_OPTIONS, "tokenizer")
SHARED_FILES = ("model", "config", "weights")  # read by every worker from its own machine
_PYTHON = {"True": True, "False": False, "None": None}  # as in Python
_NAME = re.compile(r"[A-Za-z_]\w*")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_DEFAULT = Source()
Model = PretrainedModel | FunctionModel


@lru_cache(maxsize=8)
def chosen_model(source: Source, kind: str) -> Model | None:
    """Return the model of a kind ("causal", "sequence", "image") that a source names, not yet read; None if none."""
    tokenizer = None if source.tokenizer is None else _folder(source.tokenizer, "tokenizer", source, weights=False)
    described: dict[str, Any] = {"tokenizer_folder": tokenizer, "trusted": source.trust_remote_code}
    described |= {"dtype": source.dtype, "attention": source.attention}
    if source.model is not None:
        if is_function_name(source.model) and not Path(source.model).is_dir():
            if source.attention is not None:
                raise OptionError(
                    f"{{attention}} {source.attention} is for models that transformers builds; set it in {source.model}"
                )
            if source.dtype != "float32":
                raise OptionError(
                    f"{{dtype}} {source.dtype} is for models that transformers builds; {source.model} makes its own "
                    "weights: leave it out"
                )
            return FunctionModel(source.model, tokenizer, trusted=source.trust_remote_code)
        folder = _folder(source.model, "model", source, weights=source.pretrained)
        return PretrainedModel(folder, kind, **described)
    if source.config is None:
        return None
    is_type = not Path(source.config).is_dir() and is_model_type(source.config)
    return PretrainedModel(
        None if is_type else _folder(source.config, "config", source, weights=False),
        kind,
        option="config",
        model_type=source.config if is_type else None,
        changes=parse_changes(source.config_set or ""),
        has_weights=False,
        **described,
    )


def checkpoint_of(
    source: Source, *, task: str, kind: str, model_type: str, checkpoint: str | None
) -> PretrainedModel | None:
    """Return the checkpoint that a task's own model starts from: {weights}, or one of the hub; None: random weights."""
    if source.weights is None and (checkpoint is None or not source.pretrained):
        return None
    if source.width is not None:
        raise OptionError("{width} is for random weights, a checkpoint has its own: leave it or add {no_pretrained}")
    folder = source.weights
    if folder is None:
        assert checkpoint is not None
        folder = fetch_model(checkpoint, "weights", weights=True, code=False, task=task)
    model = PretrainedModel(folder, kind, option="weights")
    found = model.facts().get("model_type")
    if found != model_type:
        raise ValueError(
            f"task {task} takes weights of a {model_type}; {source.weights or checkpoint} are of a {found}"
        )
    return model


def _folder(name: str, option: str, source: Source, *, weights: bool) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if not _HUB_NAME.fullmatch(name):
        raise OptionError(
            f"{{{option}}} is a folder or a name of the hub, as in org/name, and {name} is no folder here: name "
            "one that is there"
        )
    return fetch_model(name, option, weights=weights, code=source.trust_remote_code)


def identity(name: str, source: Source) -> dict[str, str]:
    """Return hashes that identify one of ``SHARED_FILES`` wherever it is; raise ValueError if it has no files."""
    folder, has_weights = shared_folder(name, source)
    if folder is None:
        return {"name": str(getattr(source, name))}
    return folder_identity(folder, weights=has_weights)


def shared_folder(name: str, source: Source) -> tuple[Path | None, bool]:
    """Return the folder that one of ``SHARED_FILES`` names, and whether its weights are read; None if it has no files.

    Raise ValueError if it cannot be found.
    """
    given = str(getattr(source, name))
    if not Path(given).is_dir() and (is_function_name(given) if name == "model" else is_model_type(given)):
        return None, False
    if name == "weights":
        return Path(given), any(Path(given).glob("*.safetensors"))
    has_weights = name == "model" and source.pretrained
    return _folder(given, name, source, weights=has_weights), has_weights


def is_model_type(name: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return name in CONFIG_MAPPING_NAMES


def parse_changes(text: str) -> dict[str, Any]:
    """Parse ``hidden_size=256,rope_scaling=null,layer_types=["a","b"]``: values are JSON, or else strings."""
    changes: dict[str, Any] = {}
    while text.strip():
        name, equals, rest = text.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise OptionError(
                "{config_set} takes names of the model's config and their values, as in "
                f"hidden_size=256,num_hidden_layers=4; got {text}"
            )
        value, text = _value(rest)
        changes[name.strip()] = value
    return changes


def _value(text: str) -> tuple[Any, str]:
    """Return the first value of a list, and the text after its comma."""
    text = text.lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
        rest = text[end:].lstrip()
        if not rest or rest.startswith(","):  # otherwise it only begins like JSON
            return value, rest[1:]
    except ValueError:
        pass
    word, _, rest = text.partition(",")
    return _PYTHON.get(word.strip(), word.strip()), rest


def reject_unused_options(task: str, source: Source, taken: Iterable[str], why: str = "") -> None:
    """Raise ValueError if the source sets an option that the task does not use; random weights are always allowed."""
    given = [field.name for field in fields(source) if getattr(source, field.name) != getattr(_DEFAULT, field.name)]
    refused = [option(name) for name in given if name not in {*taken, "pretrained"}]
    if source.weights is not None and not source.pretrained:
        raise OptionError("{weights} and {no_pretrained} contradict each other: give one")
    if refused:
        may = ", ".join(option(name) for name in taken) or "nothing"
        raise OptionError(f"task {task} takes {may} and not {', '.join(refused)}{why and ': ' + why}")


def option(name: str) -> str:
    """Return the placeholder of a field of ``Source`` in error messages."""
    return "{no_pretrained}" if name == "pretrained" else f"{{{name}}}"


def data_file(path: Path | None, task: str, option: str, *suffixes: str) -> Path:
    """Return the file that an option names; raise OptionError unless it is there and has one of these suffixes."""
    if path is None or path.suffix.lower() not in suffixes or not path.is_file():
        got = "none was given" if path is None else f"{path} is {'another kind' if path.exists() else 'not there'}"
        wanted = " or ".join(f"FILE{suffix}" for suffix in suffixes)
        raise OptionError(f"task {task} needs {{{option}}} {wanted}; {got}")
    return path


def check_tokens(tokens: int, texts: int) -> None:
    """Raise ValueError if this number of texts, as token ids and masks, does not fit into memory."""
    check_fits(f"{{tokens}} {tokens}: the data, {texts} texts,", 16 * tokens * texts, "take fewer")


def positive(name: str, value: int | None, default: int, *, least: int = 1) -> int:
    """Return the value, or the task's default for None; raise ValueError if it is below ``least``."""
    if value is None:
        return default
    if value < least:
        raise OptionError(f"{option(name)} is at least {least}, got {value}")
    return value


class ModelTask(Task):
    """A task with any transformers model, with a user's function that returns one, or with a model of its own."""

    @abstractmethod
    def model(self, source: Source) -> Model | None:
        """Return the model that the source names; None if the task's own is trained."""

    def model_without_data(self, source: Source) -> Model | None:
        """Return the same model on any worker: only the client has data and tokenizer."""
        return self.model(replace(source, tokenizer=None))

    def own_model(self, shape: Shape, source: Source) -> nn.Module:
        """Return the task's own model with its weights."""
        raise NotImplementedError

    def build(self, shape: Shape, source: Source) -> nn.Module:
        """Return the task's own model, or the named one: on the meta device, unless a function builds it."""
        model = self.model_without_data(source)
        if model is None:
            return self.own_model(shape, source)
        if isinstance(model, FunctionModel):
            return with_plain_statistics(model.build())
        if model.kind != "causal":
            model = replace(model, classes=shape.classes, labels=shape.labels)
        if shape.special is not None:
            assert shape.vocabulary is not None
            model = model.fitted(shape.vocabulary, shape.special)
        return with_plain_statistics(model.init_on_meta())

    def weight_loader(self, source: Source, seed: int) -> LoadWeights | None:
        model = self.model_without_data(source)
        if not isinstance(model, PretrainedModel):
            return None
        return model.weight_loader(pretrained=source.pretrained, seed=seed)

    def init_on_meta(self, source: Source) -> nn.Module | None:
        model = self.model_without_data(source)
        return model.init_on_meta() if isinstance(model, PretrainedModel) else None
