"""A barrier that separates measurements and never times out in practice."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from thinpipe.comm.backend import new_group
from thinpipe.comm.group import Group

# A worker without a part in a measurement waits until it is over. The death of a worker is still detected immediately,
# because its connections close.
WAIT = timedelta(days=1)


class Barrier:
    """A group of all workers that serves only as a barrier; its timeout is a day."""

    def __init__(self) -> None:
        self._group = Group.of(new_group(timeout=WAIT))

    def gather(self, value: Any) -> list[Any]:
        """Return the values (JSON) of all workers once all have called this."""
        return self._group.gather(value)

    def wait(self) -> None:
        """Return once all workers have called this."""
        self._group.barrier()
