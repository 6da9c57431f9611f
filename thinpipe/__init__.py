"""thinpipe: train a model whose layers live on several machines, over links too thin for it."""

import importlib
from typing import TYPE_CHECKING, Any

from thinpipe.codecs import Codec, codec
from thinpipe.version import __version__

if TYPE_CHECKING:
    from thinpipe.pipeline import ClientServerSchedule, PipelineStage

__all__ = ["ClientServerSchedule", "Codec", "PipelineStage", "__version__", "codec"]


def __getattr__(name: str) -> Any:
    """Pipelines on first use: torch.distributed.pipelining takes a second to import, codecs do not need it."""
    if name in ("ClientServerSchedule", "PipelineStage"):
        return getattr(importlib.import_module("thinpipe.pipeline"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
