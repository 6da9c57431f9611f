"""The barrier between measurements."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinpipe.comm.backend import CPU
from thinpipe.comm.exchange import gather

# A worker that has no part in a measurement waits for as long as it takes. One that dies is noticed at once all the
# same: its connections close.
WAIT = timedelta(days=1)


class Barrier:
    """A process group of all workers for nothing but waiting for each other; gloo, with a timeout of a day."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=WAIT)

    def gather(self, value: Any) -> list[Any]:
        """Return the values (JSON) of all workers once all have called this."""
        return gather(value, self._group, CPU)

    def wait(self) -> None:
        """Return once all workers have called this."""
        self.gather(None)
