"""Import of objects that users name as ``package.module:attribute``."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from thinpipe.system.sanitize import first_line

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_forbidden: list[str] = []  # the reason, once imports are forbidden in this process


def is_object_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def forbid_imports(reason: str) -> None:
    """Let ``import_object`` raise from now on, in a process whose options come from another machine."""
    _forbidden.append(reason)


def import_object(name: str) -> Any:
    """Return the object that ``package.module:attribute`` names; raise ImportError with a one-line reason.

    This runs the module's code: the name must come from the user, or from files whose code the user trusts.
    """
    if _forbidden:
        raise ImportError(_forbidden[0])
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, so that a script in the working directory is found
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(str(error)) from None
    except Exception as error:  # the user's module may raise anything
        raise ImportError(error_text(error)) from None


def error_text(error: Exception) -> str:
    """Return an exception of foreign code as one line."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
