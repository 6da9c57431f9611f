"""thinpipe: train a model whose layers live on several machines, over links too thin for it."""

import importlib
from typing import TYPE_CHECKING, Any

from thinpipe.version import __version__

if TYPE_CHECKING:
    from thinpipe.codecs import Codec, codec
    from thinpipe.ddp import ddp_hook, ddp_state
    from thinpipe.engines.units import cut
    from thinpipe.pipeline import ClientServerSchedule, PipelineStage

__all__ = ["ClientServerSchedule", "Codec", "PipelineStage", "__version__", "codec", "cut", "ddp_hook", "ddp_state"]

_LAZY = {
    "ClientServerSchedule": "thinpipe.pipeline",
    "Codec": "thinpipe.codecs",
    "PipelineStage": "thinpipe.pipeline",
    "codec": "thinpipe.codecs",
    "cut": "thinpipe.engines.units",
    "ddp_hook": "thinpipe.ddp",
    "ddp_state": "thinpipe.ddp",
}


def __getattr__(name: str) -> Any:
    """What needs torch, on first use: it takes seconds to import, and a command line may only want its help."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
