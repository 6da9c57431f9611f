"""Compilation of the loops with numba: without the GIL, cached in a folder named by a hash of their sources.

numba's own cache checks only the file that a function is in: a function that calls a loop of another file, or that
uses a constant of ``layout.py``, would keep the old one. A folder per hash of all these sources is never stale, and
processes that run other sources do not write to it.

Private names of numba, as of 0.68: ``_cache`` of a compiled function and its ``save_overload``.
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
    """Return a hash of the contents of these files and of their relative paths."""
    hashed = hashlib.sha256()
    for path in sources:
        hashed.update(f"{path.parent.name}/{path.name}\n".encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


@cache
def folder() -> Path | None:
    """Return the cache folder of compiled loops: the first one that is writable, or None."""
    name = "loops-" + digest([*sorted((HERE / "loops").glob("*.py")), Path(__file__), Path(layout.__file__)])
    chosen = [Path(_settings.CACHE_DIR)] if _settings.CACHE_DIR else []
    for parent in (*chosen, HERE / "__pycache__", Path("~/.cache/thinpipe")):
        try:
            kept_in = parent.expanduser() / name
            kept_in.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=kept_in).close()
        except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
            continue
        return kept_in
    return None


def jit(function: Callable[..., Any]) -> Any:
    """Compile on first use and cache the result; without a writable folder, compile in every process."""
    kept_in = folder()
    if kept_in is None:
        return njit(**OPTIONS)(function)
    before = _settings.CACHE_DIR
    _settings.CACHE_DIR = str(kept_in)  # numba reads this when it decorates
    try:
        compiled = njit(cache=True, **OPTIONS)(function)
    finally:
        _settings.CACHE_DIR = before
    _save_alone(compiled._cache, kept_in)
    return compiled


def _save_alone(cache: Any, kept_in: Path) -> None:
    """Lock the cache folder while numba saves a compiled function.

    numba reads the index of a function and writes it back with its own entry under the next number. Without the lock,
    of two processes at the same time one would overwrite the other's file, and later processes would call code that was
    compiled for other types.
    """
    save = cache.save_overload

    def save_alone(signature: Any, compiled: Any) -> None:
        # On a full disk nothing is saved, and the next run compiles again.
        with contextlib.suppress(OSError), open(kept_in / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            save(signature, compiled)

    cache.save_overload = save_alone
