"""A model that a user's own function returns: ``package.module:function``."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinpipe.options import OptionError
from thinpipe.system.sanitize import first_line
from thinpipe.train.models.pretrained import check_cut, read_tokenizer

_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_function_name(text: str) -> bool:
    return _FORM.fullmatch(text) is not None


def import_object(name: str, rule: str) -> Any:
    """Import what ``package.module:attribute`` names; raise OptionError, beginning with the rule, if that fails."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, so that a script in the working directory is found
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{rule}; {name!r} cannot be imported: {error}") from None
    except Exception as error:  # the user's module may raise anything
        raise OptionError(f"{rule}; {name!r} cannot be imported: {error_text(error)}") from None


def import_function(name: str, rule: str) -> Callable[..., Any]:
    """Import the function of that name; raise OptionError, beginning with the rule, if there is none."""
    found: Callable[..., Any] = import_object(name, rule)
    if not callable(found):
        raise OptionError(f"{rule}; {name!r} is no function")
    return found


@dataclass(frozen=True)
class FunctionModel:
    """A model that is built again, with weights, on every call; its random weights come from torch's generator."""

    name: str
    tokenizer_folder: Path | None = None
    trusted: bool = False  # True: run code that comes with the tokenizer
    trains_tokenizer: ClassVar[bool] = False  # its embedding already covers every token

    def tokenizer(self) -> Any:
        if self.tokenizer_folder is None:
            raise OptionError(
                f"{{model}} {self.name} is a function, which has no tokenizer: name one with {{tokenizer}}"
            )
        return read_tokenizer(self.tokenizer_folder, trusted=self.trusted)

    def function(self) -> Callable[[], Any]:
        return import_function(
            self.name,
            "{model} package.module:function names a function without arguments that returns an nn.Sequential, a list "
            "of units or a model of transformers",
        )

    def fitted_to(self, tokenizer: Any) -> FunctionModel:
        return self

    def check_weights(self, *, pretrained: bool = True) -> None:
        """Raise ValueError unless the function can be imported: it makes its own weights."""
        self.function()

    def build(self) -> nn.Module:
        """Return a transformers model, or an nn.Sequential of the units."""
        function = self.function()
        try:
            made = function()
        except Exception as error:
            raise ValueError(f"{self.name} was called without arguments and raised {error_text(error)}") from None
        if isinstance(made, list | tuple) and made and all(isinstance(unit, nn.Module) for unit in made):
            made = nn.Sequential(*made)
        if not isinstance(made, nn.Sequential) and not is_of_transformers(made):
            raise ValueError(
                f"{self.name} should return an nn.Sequential, a list of units or a model of transformers; it returned "
                f"{_kind(made)}"
            )
        return made.cpu()

    def vocabulary_of(self, made: nn.Module, tokens: int) -> int:
        """Return a built model's vocabulary size, for units by running them; raise ValueError if they do not fit."""
        if not isinstance(made, nn.Sequential):
            config: Any = made.config
            return int(config.get_text_config().vocab_size)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        rule = f"the units of {self.name} should make logits [N, T, tokens] of token ids [N, T]; for {list(ids.shape)}"
        shapes = _shapes_of(made, (ids,), rule)
        if len(shapes) != 1 or not isinstance(shapes[0], list) or shapes[0][:-1] != list(ids.shape):
            raise ValueError(f"{rule} they return {', '.join(map(str, shapes))}")
        return int(shapes[0][-1])

    def check_classes(self, inputs: tuple[Tensor, ...], classes: int, kind: str) -> None:
        """Raise ValueError unless the model has ``classes`` outputs for such samples and can be cut."""
        with torch.random.fork_rng(devices=[]):
            made = self.build()
        if is_of_transformers(made):
            config: Any = made.config
            if config.num_labels != classes:
                raise ValueError(f"{self.name} has {config.num_labels} classes, and the data has {classes}")
            check_cut(config, type(made)._from_config, kind)  # type: ignore[attr-defined]
            return
        given = ", ".join(str(list(each.shape)) for each in inputs)
        rule = f"the units of {self.name} should make logits [N, {classes}] of samples; for {given}"
        shapes = _shapes_of(made, inputs, rule)
        if shapes != [[len(inputs[0]), classes]]:
            raise ValueError(f"{rule} they return {', '.join(map(str, shapes))}")


def _shapes_of(made: Any, values: tuple[Any, ...], rule: str) -> list[list[int] | str]:
    """Return the shapes that consecutive units return for some values; raise ValueError if a unit raises."""
    try:
        with torch.no_grad():
            for unit in made.eval():
                found = unit(*values)
                values = found if isinstance(found, tuple) else (found,)
    except Exception as error:
        raise ValueError(f"{rule} they raise {error_text(error)}") from None
    finally:
        made.train()
    return [list(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in values]


def is_of_transformers(model: Any) -> bool:
    return isinstance(model, nn.Module) and hasattr(model, "base_model_prefix")


def _kind(made: Any) -> str:
    other = next((each for each in made if not isinstance(each, nn.Module)), None) if isinstance(made, list) else None
    return f"a {type(made).__name__}" + (f" with a {type(other).__name__} in it" if other is not None else "")


def error_text(error: Exception) -> str:
    """Return an exception of foreign code as one line."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
