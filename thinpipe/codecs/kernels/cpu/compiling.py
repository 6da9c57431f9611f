"""How the loops are compiled: without the GIL, kept between runs in a folder named after the sources they are made of.

numba's own cache watches only the file that a function is in: one that calls a loop of another file, or that has a
constant of ``layout.py`` in it, would go on with the old one. A folder for every state of all those sources is never
stale, and processes that run other sources do not write to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import njit

from thinpipe.codecs import layout

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
HERE = Path(__file__).parent
_settings: Any = numba.config


def digest(sources: list[Path]) -> str:
    """A name for what these files say and where they lie beside each other."""
    said = hashlib.sha256()
    for path in sources:
        said.update(f"{path.parent.name}/{path.name}\n".encode())
        said.update(path.read_bytes())
    return said.hexdigest()[:16]


@cache
def folder() -> Path | None:
    """Where compiled loops are kept: the first place that can be written to, or None."""
    name = "loops-" + digest([*sorted((HERE / "loops").glob("*.py")), Path(__file__), Path(layout.__file__)])
    chosen = [Path(_settings.CACHE_DIR)] if _settings.CACHE_DIR else []
    for parent in (*chosen, HERE / "__pycache__", Path("~/.cache/thinpipe")):
        try:
            kept_in = parent.expanduser() / name
            kept_in.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=kept_in).close()
        except (OSError, RuntimeError):  # RuntimeError: a user without a home
            continue
        return kept_in
    return None


def jit(function: Callable[..., Any]) -> Any:
    """Compile on first use. Where nothing can be kept, every run does."""
    kept_in = folder()
    if kept_in is None:
        return njit(**OPTIONS)(function)
    before = _settings.CACHE_DIR
    _settings.CACHE_DIR = str(kept_in)  # numba looks there while it decorates
    try:
        compiled = njit(cache=True, **OPTIONS)(function)
    finally:
        _settings.CACHE_DIR = before
    _save_alone(compiled._cache, kept_in)
    return compiled


def _save_alone(cache: Any, kept_in: Path) -> None:
    """Let one process at a time keep what it compiled.

    numba reads what there is of a function, and writes that with its own under the next number. Of two processes that
    do so at once one would write over the other's, and all later ones call what was compiled for other types.
    """
    save = cache.save_overload

    def save_alone(signature: Any, compiled: Any) -> None:
        # On a full disk, nothing is kept, and the next run compiles again.
        with contextlib.suppress(OSError), open(kept_in / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            save(signature, compiled)

    cache.save_overload = save_alone
