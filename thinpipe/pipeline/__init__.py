"""Pipelines: stages that talk through codecs, on torch.distributed.pipelining."""

from thinpipe.pipeline.errors import LinkError
from thinpipe.pipeline.schedule import ClientServerSchedule, LinearSchedule
from thinpipe.pipeline.stage import PipelineStage

__all__ = ["ClientServerSchedule", "LinearSchedule", "LinkError", "PipelineStage"]
