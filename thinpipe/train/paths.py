"""Options that name files: parsed to absolute paths, which may differ on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinpipe.train.tasks.sources import HUB


def _absolute(path: Path) -> str:
    return str(path) if str(path).startswith(HUB) else str(path.resolve())


def _absolute_if_there(text: str) -> str:
    """Return the absolute path of text that exists or can only be a path; otherwise the text, a name of the hub."""
    path = Path(text)
    return str(path.resolve()) if path.exists() or text.startswith((".", "/", "~")) else text


# Keyword arguments for such options, as in ``option("Where.", **ON_DISK)``.
_FILES: dict[str, Any] = {"movable": True, "per_machine": True, "default": None}
ON_DISK: dict[str, Any] = {"kind": Path, "parse": _absolute, **_FILES}
NAMED: dict[str, Any] = {"parse": _absolute_if_there, **_FILES}  # a path, or a name of the hub
