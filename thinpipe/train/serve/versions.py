"""Versions of this machine's packages, as client and servers compare them."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from thinpipe.version import __version__


def versions() -> dict[str, str]:
    """Return the versions that a run may depend on, by package."""
    return {
        "thinpipe": __version__,
        "torch": str(torch.__version__),
        "transformers": metadata.version("transformers"),  # not imported: that takes seconds
        "python": platform.python_version(),
    }
