"""The time of a training step by part, as records of training and of the pipeline benchmark have it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from thinpipe.lab.records.record import column


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The parts of a step, of one worker, or their sum or mean over workers; None if a part was not measured."""

    compute_ms: float | None = column("compute\nms", format=".1f", default=None)
    encode_ms: float | None = column("encode\nms", format=".1f", default=None)
    wait_ms: float | None = column("wait\nms", format=".1f", default=None)  # for a sender that has nothing to send yet
    transfer_ms: float | None = column("transfer\nms", format=".1f", default=None)  # not hidden by compute
    decode_ms: float | None = column("decode\nms", format=".1f", default=None)


def step_times(compute_ms: float, sent: Iterable[Any], received: Iterable[Any], steps: int) -> StepTimes:
    """Return the times per step from links with totals; encode counts for senders, the rest for receivers."""

    # torch's stage reports NaN for times that it does not measure.
    def per_step(name: str, links: Iterable[Any]) -> float | None:
        total_ms = math.fsum(getattr(link, name) for link in links)
        return None if math.isnan(total_ms) else total_ms / steps

    received = list(received)
    return StepTimes(
        compute_ms=compute_ms,
        encode_ms=per_step("encode_ms", sent),
        wait_ms=per_step("wait_ms", received),
        transfer_ms=per_step("transfer_ms", received),
        decode_ms=per_step("decode_ms", received),
    )
