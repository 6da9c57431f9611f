"""Checks of a model's config.json from an untrusted source, before transformers reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thinpipe.options import OptionError
from thinpipe.system.files import read_json

WHAT = "the description of a model"
# Per kind: Doge has 16,384 experts, the deepest models a thousand layers; each takes milliseconds.
MOST_MODULES = 20_000
_COUNTS = re.compile(r"(layers?|blocks?|depths?|experts|groups|stages)$")
_IMPLEMENTATION = "_implementation"
_SHOWN = 60  # characters of a value


def read_description(file: Path, *, trusted: bool) -> dict[str, Any]:
    """Return the config; raise ValueError if it is invalid, names untrusted code, or declares too many modules."""
    facts = read_object(file, WHAT)
    check_counts(str(file), facts)
    if not trusted:
        check_code(str(file), facts)
    return facts


def read_object(file: Path, what: str, remedy: str = "bring the model's own") -> dict[str, Any]:
    """Return the object in a JSON file; raise ValueError if it has something else."""
    facts = read_json(file, what)
    if not isinstance(facts, dict):
        raise ValueError(f"{file} cannot be read as {what}: it is no object; {remedy}")
    return facts


def check_counts(where: str, facts: Mapping[str, Any]) -> None:
    """Raise OptionError if there are more layers, experts or the like than any model has: building would not end."""
    for name, value in _values(facts):
        if _COUNTS.search(name) and type(value) is int and value > MOST_MODULES:
            raise OptionError(f"{where}: {name} is at most {MOST_MODULES}, got {_shown(value)}; describe another model")


def check_code(where: str, facts: Mapping[str, Any]) -> None:
    """Raise OptionError if transformers (seen: 5.17, 5.22) would run code that the values of a config name.

    Such code comes with the model (``auto_map``), or is a kernel of the hub: "org/kernel" as an attention
    implementation is downloaded if the package ``kernels`` is installed. ``configuration_files`` would replace the file
    that is read here.
    """
    for name, value in _values(facts):
        if name == "auto_map" and value is not None:
            raise OptionError(
                f"the code of the model in {Path(where).parent} comes with it, and thinpipe runs none from a model's "
                "folder: read it, and give {trust_remote_code} if you trust it"
            )
        if _IMPLEMENTATION in name and isinstance(value, str) and "/" in value:
            raise OptionError(
                f"{where}: {name} {_shown(value)} is code of the hub, and thinpipe runs none from there: remove it, or "
                "give {trust_remote_code} if you trust it"
            )
        if name == "configuration_files":
            raise ValueError(
                f"{where} names other descriptions ({name}), and only this one is read: remove them from it"
            )


def _values(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every name with its value, including those of nested configs; items of a list have the list's name.

    Attention implementations per part of the model keep the outer name. Not recursive, since a file may nest deeply.
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
