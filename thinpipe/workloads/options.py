"""What of a source a task can use: the rest is an error, never ignored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from thinpipe.measure.sizes import check_fits
from thinpipe.options import OptionError
from thinpipe.workloads.task import Source

_DEFAULT = Source()


def refuse_others(task: str, source: Source, taken: Iterable[str], why: str = "") -> None:
    """ValueError if the source sets anything but what the task takes; random weights may be asked of any."""
    given = [field.name for field in fields(source) if getattr(source, field.name) != getattr(_DEFAULT, field.name)]
    refused = [option(name) for name in given if name not in {*taken, "pretrained"}]
    if source.weights is not None and not source.pretrained:
        raise OptionError("{weights} and {no_pretrained} contradict each other: give one")
    if refused:
        may = ", ".join(option(name) for name in taken) or "nothing"
        raise OptionError(f"task {task} takes {may} and not {', '.join(refused)}{why and ': ' + why}")


def option(name: str) -> str:
    """How an error names a field of ``Source``."""
    return "{no_pretrained}" if name == "pretrained" else f"{{{name}}}"


def check_tokens(tokens: int, texts: int) -> None:
    """ValueError if so many texts of that length, held as token ids and masks, do not fit into memory."""
    check_fits(f"{{tokens}} {tokens}: the data, {texts} texts,", 16 * tokens * texts, "take fewer")


def positive(name: str, value: int | None, default: int, *, least: int = 1) -> int:
    """The value, or the task's own choice; ValueError if it is below the least that works."""
    if value is None:
        return default
    if value < least:
        raise OptionError(f"{option(name)} is at least {least}, got {value}")
    return value
