"""Codecs as plans list them: ``"uniform:8,6,4"`` is three; ``{ forward = ..., backward = ... }`` is a pair."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from thinpipe.codecs.recipes import RECIPES, directions
from thinpipe.codecs.spec import codec, split_specs
from thinpipe.pipeline.links.spec import encoding

CODEC_KEYS = {"forward": "compress-forward", "backward": "compress-backward"}  # of a plan -> options of thinpipe train


def expand_codecs(entries: Sequence[Any]) -> list[dict[str, str]]:
    """The options of thinpipe train for every codec of a list.

    ``["fp16", "sort:8,2+2"]`` -> ``fp16``, ``sort:6+2``, ``sort:2+2``, each in both directions. Specs come out in
    full, so that two ways to write a codec are one run.
    """
    return [options for entry in entries for options in _entry(entry)]


def _entry(entry: Any) -> list[dict[str, str]]:
    if isinstance(entry, str) and entry in RECIPES:
        return [dict(zip(CODEC_KEYS.values(), map(in_full, directions(entry)), strict=True))]
    if isinstance(entry, str):
        return [{"compress": spec} for spec in _specs(entry)]
    if isinstance(entry, dict) and entry.keys() == CODEC_KEYS.keys():
        sides = [[(CODEC_KEYS[side], spec) for spec in _specs(entry[side])] for side in CODEC_KEYS]
        return [dict(pairs) for pairs in product(*sides)]
    raise ValueError(
        'a codec is a spec for both directions, as in "sort:8", a recipe, as in "4bit", or '
        '{ forward = "kmeans:2", backward = "sort:8" }; '
        f"got {entry!r}"
    )


def _specs(text: Any) -> list[str]:
    if not isinstance(text, str):
        raise ValueError(f'a codec is named by its spec, as in "sort:8"; got {text!r}')
    if "(" in text:  # a comma in brackets is not one between specs
        return [encoding(spec).spec for spec in split_specs(text)]
    name, colon, arguments = text.partition(":")
    return [codec(f"{name}{colon}{argument.strip()}").spec for argument in arguments.split(",")]


def in_full(text: str) -> str:
    """``sort:8`` as ``sort:6+2``; what is no spec as it is."""
    try:
        return encoding(text).spec
    except ValueError:
        return text
