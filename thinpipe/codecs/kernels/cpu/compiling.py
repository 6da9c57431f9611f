"""How the loops are compiled: without the GIL, kept between runs where there is a place to keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def jit(function: Callable[..., Any]) -> Any:
    """Compile on first use. Where neither the package's folder nor the user's cache can be written, every run does."""
    try:
        return njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # numba: "no locator available"
        return njit(**OPTIONS)(function)
