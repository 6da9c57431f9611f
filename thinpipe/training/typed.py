"""Dataclasses from JSON: every field of its type, none unknown, and a ValueError that names the one that is not."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_facts(kind: type[T], facts: Any, what: str) -> T:
    """What ``asdict`` made JSON of. A field that is not there takes its default, if it has one.

    So a field that a later version adds has as its default what earlier versions did.
    """
    if not isinstance(facts, Mapping):
        raise ValueError(f"{what} should be an object, got {_text(facts)}")
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(facts.keys() - known.keys())
    if unknown:
        raise ValueError(f"{what} have {', '.join(map(repr, unknown))}, which thinpipe does not know in this version")
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in facts:
            if not _fits(facts[name], hints[name]):
                raise ValueError(f"{what}: {name} cannot be {_text(facts[name])}")
            values[name] = tuple(facts[name]) if isinstance(facts[name], list) else facts[name]
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{what} have no {name!r}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        if inner[-1] is Ellipsis:
            return all(_fits(each, inner[0]) for each in value)
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return type(value) is hint  # True is no number


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
