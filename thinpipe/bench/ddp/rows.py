"""Which replicas run together, and what they measured -> the rows of the benchmark: percentiles of the iteration time.

The first replica runs without DDP, then 1, 2, 4, ... and all do, while the others wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from thinpipe.measure.record import Column, Row
from thinpipe.workers.exchange import CPU, gather

# A replica that waits for a smaller group does so for as long as that group takes. One that dies is noticed at once
# all the same: its connections close.
WAIT = timedelta(days=1)

NO_DDP = "no ddp"
KIND = "bench ddp"
PERCENTILES = (50, 75, 90, 95)

COLUMNS = (
    Column(name="model", heading="model", key=True),
    Column(name="ddp", heading="ddp", key=True),
    Column(name="replicas", heading="replicas", key=True),
    Column(name="group", heading="group"),
    Column(name="device", heading="device"),
    Column(name="batch_size", heading="batch\nsize", format="d"),
    *(
        column
        for p in PERCENTILES
        for column in (
            Column(name=f"p{p}_s", heading=f"p{p}\nsec/iter", format=".3f", better="lower"),
            Column(name=f"p{p}_examples_per_s", heading=f"p{p}\nex/sec", format=".0f", better="higher"),
        )
    ),
    Column(name="gradient_bytes", heading="gradient\nbytes", format="d"),
    Column(name="wire_bytes", heading="wire\nbytes", format="d", better="lower"),
)


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


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one replica measured."""

    samples_s: tuple[float, ...]
    gradient_bytes: int
    wire_bytes: int | None  # of one iteration; None where nobody counts


def make_row(model: str, group: Group, batch_size: int, device: str, samples: Sequence[Sample]) -> Row:
    """An iteration takes as long as it takes the slowest replica; examples are those of one replica, as it is fed."""
    slowest_s = [max(each) for each in zip(*(sample.samples_s for sample in samples), strict=True)]
    row: dict[str, Any] = {
        "model": model,
        "ddp": "ddp" if group.ddp else "no ddp",
        "replicas": group.size,
        "group": group.name,
        "device": device,
        "batch_size": batch_size,
    }
    for p in PERCENTILES:
        seconds = float(np.percentile(slowest_s, p))
        row |= {f"p{p}_s": seconds, f"p{p}_examples_per_s": batch_size / seconds}
    return row | {
        "gradient_bytes": samples[0].gradient_bytes,
        "wire_bytes": samples[0].wire_bytes,
        "samples_s": slowest_s,
    }
