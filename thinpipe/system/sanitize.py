"""Sanitizing of untrusted text for printing: peers and records must not control a terminal."""

from __future__ import annotations

import unicodedata
from typing import Any

_REPLACEMENT = "?"
# Controls (of which escape sequences begin with one), surrogates, and separators of lines and paragraphs.
_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
# Bidirectional control characters, which change the order in which surrounding text is shown.
_BIDI = {"\u061c", "\u200e", "\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}


def printable(text: str) -> str:
    """Replace control characters, escapes and bidirectional marks; keep line ends, replace tabs by spaces."""
    return "".join(
        _REPLACEMENT if each != "\n" and (each in _BIDI or unicodedata.category(each) in _CATEGORIES) else each
        for each in text.replace("\t", " ")
    )


def printable_json(value: Any) -> Any:
    """Return JSON with ``printable`` texts and names, however nested."""
    if isinstance(value, dict):
        return {printable(name): printable_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [printable_json(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def one_line(text: str) -> str:
    """Return ``printable`` text with all white space as single spaces."""
    return printable(" ".join(text.split()))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without its full stop, or the error's type if there is none."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line.rstrip(".") or type(error).__name__
