"""Compressed gradients for DistributedDataParallel: a communication hook, and what it remembers between steps."""

from thinpipe.ddp.hook import ddp_hook
from thinpipe.ddp.state import DDPState, ddp_state

__all__ = ["DDPState", "ddp_hook", "ddp_state"]
