"""Numbers of bytes as users write and read them."""

from __future__ import annotations

import re

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_LARGE = {"TB": 10**12, "PB": 10**15, "EB": 10**18}  # nobody asks for as much, but mistakes come to it
_DIGITS = 30  # more than any size has, and far from where a float ends
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str) -> int:
    """``1kB`` and ``1.5MB`` in thousands, as networks count; ``4GiB`` in powers of two, as memory does."""
    units = _DECIMAL | _BINARY
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(units)})", text.strip().upper())
    if match is None or len(match[1]) > _DIGITS:
        raise ValueError(f"a size is a number with its unit, as in 100kB, 1.5MB or 4GiB; got {text[:40]!r}")
    return int(float(match[1]) * units[match[2]])


def size_text(size: int) -> str:
    """The same the other way, in thousands."""
    units = _DECIMAL | _LARGE
    unit, count = next(((unit, count) for unit, count in reversed(units.items()) if size >= count), ("B", 1))
    return f"{size / count:.4g} {unit.replace('K', 'k')}"
