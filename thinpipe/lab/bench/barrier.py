"""The group whose barriers separate measurements; it never times out in practice."""

from __future__ import annotations

from datetime import timedelta

from thinpipe.comm.backend import new_group
from thinpipe.comm.group import Group

# A worker without a part in a measurement waits until it is over. The death of a worker is still detected immediately,
# because its connections close.
WAIT = timedelta(days=1)


def barrier_group() -> Group:
    """Return a group of all workers with a timeout of a day. A collective."""
    return Group.of(new_group(timeout=WAIT))
