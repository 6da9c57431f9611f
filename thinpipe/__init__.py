"""thinpipe: train a model whose layers live on several machines, over links too thin for it."""

import importlib
from typing import TYPE_CHECKING, Any

from thinpipe.codecs import Codec, codec
from thinpipe.version import __version__

if TYPE_CHECKING:
    from thinpipe.ddp import ddp_hook, ddp_state
    from thinpipe.pipeline import ClientServerSchedule, PipelineStage

__all__ = ["ClientServerSchedule", "Codec", "PipelineStage", "__version__", "codec", "ddp_hook", "ddp_state"]

_LAZY = {
    "ClientServerSchedule": "thinpipe.pipeline",
    "PipelineStage": "thinpipe.pipeline",
    "ddp_hook": "thinpipe.ddp",
    "ddp_state": "thinpipe.ddp",
}


def __getattr__(name: str) -> Any:
    """What needs torch.distributed, on first use: it takes a second to import, codecs do not need it."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
