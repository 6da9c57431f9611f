"""Pipelines: stages that exchange encoded tensors, built on torch.distributed.pipelining."""

import importlib
from typing import TYPE_CHECKING, Any

from thinpipe.comm.errors import LinkError

if TYPE_CHECKING:
    from thinpipe.pipeline.schedule import ClientServerSchedule, LinearSchedule, Schedule1F1B
    from thinpipe.pipeline.stage import PipelineStage

__all__ = ["ClientServerSchedule", "LinearSchedule", "LinkError", "PipelineStage", "Schedule1F1B"]

_LAZY = {
    "ClientServerSchedule": "thinpipe.pipeline.schedule",
    "LinearSchedule": "thinpipe.pipeline.schedule",
    "PipelineStage": "thinpipe.pipeline.stage",
    "Schedule1F1B": "thinpipe.pipeline.schedule",
}


def __getattr__(name: str) -> Any:
    """Import names that need torch's pipelining on first use: launching workers does not need it."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
