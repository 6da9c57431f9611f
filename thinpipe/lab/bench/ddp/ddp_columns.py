"""Rows of the data-parallel benchmark: the groups of replicas, and percentiles of their iteration times.

The first replica runs without DDP, then 1, 2, 4, ... and all replicas run DDP, while the others wait.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinpipe.comm.backend import new_group
from thinpipe.comm.group import ProcessGroup
from thinpipe.lab.records.record import Row, column, columns_of, row_of

NO_DDP = "no ddp"
KIND = "bench ddp"


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Percentiles of the iteration time, and the throughput at each."""

    p50_s: float = column("p50\nsec/iter", format=".4f", better="lower")
    p50_examples_per_s: float = column("p50\nex/sec", format=".0f", better="higher")
    p75_s: float = column("p75\nsec/iter", format=".4f", better="lower")
    p75_examples_per_s: float = column("p75\nex/sec", format=".0f", better="higher")
    p90_s: float = column("p90\nsec/iter", format=".4f", better="lower")
    p90_examples_per_s: float = column("p90\nex/sec", format=".0f", better="higher")
    p95_s: float = column("p95\nsec/iter", format=".4f", better="lower")
    p95_examples_per_s: float = column("p95\nex/sec", format=".0f", better="higher")


@dataclass(frozen=True, kw_only=True)
class DDPColumns:
    """A row of the benchmark: one model on one group."""

    model: str = column("model", key=True)
    ddp: str = column("ddp", key=True)
    replicas: int = column("replicas", key=True)
    group: str = column("group")
    device: str = column("device")
    batch_size: int = column("batch\nsize", format="d")
    percentiles: Percentiles
    gradient_bytes: int = column("gradient\nbytes", format="d")
    wire_bytes: int | None = column("wire\nbytes", format="d", better="lower")
    samples_s: Sequence[float]


COLUMNS = columns_of(DDPColumns)
PERCENTILES = tuple(int(found[1]) for column in COLUMNS if (found := re.fullmatch(r"p(\d+)_s", column.name)))


@dataclass(frozen=True, kw_only=True)
class ReplicaGroup:
    """The first ``size`` replicas."""

    name: str  # number of machines and of replicas on each, as in 2M/8G
    size: int
    ddp: bool
    process_group: ProcessGroup | None = None  # None without DDP


def group_sizes(world: int) -> list[int]:
    """Return the powers of two up to the world size, and the world size: 6 -> 1, 2, 4, 6."""
    return sorted({world, *(1 << i for i in range(world.bit_length()))})


def group_name(machines: Sequence[int], letter: str) -> str:
    """Return the number of machines and the most replicas on one of them: [0, 0, 1, 1] -> 2M/2G."""
    return f"{len(set(machines))}M/{max(Counter(machines).values())}{letter}"


def make_groups(machines: Sequence[int], backend: str, letter: str) -> list[ReplicaGroup]:
    """Create all groups from the machine of each replica. A collective: in the same order on all replicas."""
    groups = [ReplicaGroup(name=NO_DDP, size=1, ddp=False)]
    for size in group_sizes(len(machines)):
        made = new_group(range(size), backend=backend)
        groups.append(ReplicaGroup(name=group_name(machines[:size], letter), size=size, ddp=True, process_group=made))
    return groups


@dataclass(frozen=True, kw_only=True)
class ReplicaTimes:
    """The measurements of one replica."""

    samples_s: tuple[float, ...]
    gradient_bytes: int
    wire_bytes: int | None  # per iteration; None without thinpipe's hook, which counts them


def make_row(model: str, group: ReplicaGroup, batch_size: int, device: str, samples: Sequence[ReplicaTimes]) -> Row:
    """Return the row of a group: times are of the slowest replica, throughput is of one replica."""
    slowest_s = [max(each) for each in zip(*(sample.samples_s for sample in samples), strict=True)]
    seconds = {p: float(np.percentile(slowest_s, p)) for p in PERCENTILES}
    rates = {f"p{p}_examples_per_s": batch_size / each for p, each in seconds.items()}
    return row_of(
        DDPColumns(
            model=model,
            ddp="ddp" if group.ddp else NO_DDP,
            replicas=group.size,
            group=group.name,
            device=device,
            batch_size=batch_size,
            percentiles=Percentiles(**rates, **{f"p{p}_s": each for p, each in seconds.items()}),
            gradient_bytes=samples[0].gradient_bytes,
            wire_bytes=samples[0].wire_bytes,
            samples_s=slowest_s,
        )
    )
