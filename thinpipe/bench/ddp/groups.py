"""Which replicas run together: the first one without DDP, then 1, 2, 4, ... and all, while the others wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinpipe.workers.exchange import CPU, gather

# A replica that waits for a smaller group does so for as long as that group takes. One that dies is noticed at once
# all the same: its connections close.
WAIT = timedelta(days=1)

NO_DDP = "no ddp"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The first so many replicas."""

    name: str  # machines and replicas on each, as in 2M/8G
    size: int
    ddp: bool
    process_group: dist.ProcessGroup | None = None  # of the replicas in it, where there is DDP


def group_sizes(world: int) -> list[int]:
    """Powers of two and all: 6 -> 1, 2, 4, 6."""
    return sorted({world, *(1 << i for i in range(world.bit_length()))})


def group_name(machines: Sequence[int], letter: str) -> str:
    """Machines that take part and the most replicas on one of them: [0, 0, 1, 1] -> 2M/2G."""
    return f"{len(set(machines))}M/{max(Counter(machines).values())}{letter}"


class Meeting:
    """Where all replicas meet between measurements, whatever they measure with."""

    def __init__(self) -> None:
        self._all = dist.new_group(backend="gloo", timeout=WAIT)

    def gather(self, value: Any) -> list[Any]:
        """The values (JSON) of all replicas, once all are here."""
        return gather(value, self._all, CPU)


def make_groups(machines: Sequence[int], backend: str, letter: str) -> list[Group]:
    """All groups, made on every replica in the same order, given the machine of each."""
    groups = [Group(name=NO_DDP, size=1, ddp=False)]
    for size in group_sizes(len(machines)):
        made = dist.new_group(list(range(size)), backend=backend)
        groups.append(Group(name=group_name(machines[:size], letter), size=size, ddp=True, process_group=made))
    return groups
