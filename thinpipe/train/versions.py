"""Versions of this machine's packages, as the workers of a run compare them."""

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


def torch_minor() -> str:
    """Return the version of torch without its last number and its build, as the workers of a run must have it."""
    return ".".join(str(torch.__version__).split(".")[:2])
