"""Checks of a model's description, its config.json from elsewhere, before transformers makes anything of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thinpipe.options import OptionError
from thinpipe.system.files import read_json

WHAT = "the description of a model"
MOST_MODULES = (
    20_000  # of a sort: Doge has 16,384 experts, the deepest models a thousand layers; each takes milliseconds
)
_COUNTS = re.compile(r"(layers?|blocks?|depths?|experts|groups|stages)$")
_IMPLEMENTATION = "_implementation"
_SHOWN = 60  # characters of a value


def read_description(file: Path, *, trusted: bool) -> dict[str, Any]:
    """Return the description; ValueError if it is none, names code and is not trusted, or asks for endless modules."""
    facts = read_json(file, WHAT)
    if not isinstance(facts, dict):
        raise ValueError(f"{file} cannot be read as {WHAT}: it is no object; bring the model's own")
    check_counts(str(file), facts)
    if not trusted:
        _check_code(file, facts)
    return facts


def check_counts(where: str, facts: Mapping[str, Any]) -> None:
    """Raise OptionError if there are more layers, experts or the like than any model has: building them has no end."""
    for name, value in _values(facts):
        if _COUNTS.search(name) and type(value) is int and value > MOST_MODULES:
            raise OptionError(f"{where}: {name} is at most {MOST_MODULES}, got {_shown(value)}; describe another model")


def _check_code(file: Path, facts: Mapping[str, Any]) -> None:
    """Raise OptionError if transformers (seen: 5.17, 5.22) would run code that the description names.

    It comes with the model (``auto_map``), or is a kernel of the hub: "org/kernel" as an implementation of attention is
    fetched where the package ``kernels`` is installed. ``configuration_files`` would replace what is read here.
    """
    for name, value in _values(facts):
        if name == "auto_map" and value is not None:
            raise OptionError(
                f"the code of the model in {file.parent} comes with it, and thinpipe runs none from a model's folder: "
                "read it, and give {trust_remote_code} if you trust it"
            )
        if _IMPLEMENTATION in name and isinstance(value, str) and "/" in value:
            raise OptionError(
                f"{file}: {name} {_shown(value)} is code of the hub, and thinpipe runs none from there: remove it from "
                "the file, or give {trust_remote_code} if you trust it"
            )
        if name == "configuration_files":
            raise ValueError(
                f"{file} names other descriptions ({name}), and only this one is read: remove them from it"
            )


def _values(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every name with its value, of descriptions within, too; items of lists have the list's name.

    So do implementations by parts of the model. Not recursive, since a file may nest deeply.
    """
    waiting: list[tuple[str, Any]] = [("", facts)]
    while waiting:
        name, value = waiting.pop()
        yield name, value
        if isinstance(value, Mapping):
            waiting += [(name if _IMPLEMENTATION in name else key, each) for key, each in value.items()]
        elif isinstance(value, list):
            waiting += [(name, each) for each in value]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
