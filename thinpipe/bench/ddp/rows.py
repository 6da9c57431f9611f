"""What replicas measured -> the rows of the benchmark: percentiles of the iteration time of every group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinpipe.bench.ddp.groups import Group
from thinpipe.measure.record import Column, Row

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
