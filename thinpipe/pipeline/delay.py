"""The delay of links against the microbatches in flight: a warning after the first step if workers wait for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from thinpipe.comm.backend import capabilities_of
from thinpipe.comm.group import Group
from thinpipe.pipeline.order import needed_in_flight


def delay_ms(stage: Any) -> float:
    """Return the delay of the slowest link to this worker; 0 if the backend has no tags. A collective."""
    if not capabilities_of(stage.group, stage.device).tags:
        return 0.0
    return Group.of(stage.group, stage.device).delay_ms()


def check_delay(stages: Sequence[Any], chunks: int, most_held: int) -> None:
    """Warn if a round trip takes longer than a microbatch and the first stage held too few of them to hide it."""
    first = stages[0]
    chunk_ms = sum(sum(stage.compute_ms().values()) for stage in stages) / chunks
    needed = min(needed_in_flight(first.num_stages, first.delay_ms, chunk_ms), chunks)
    if 2 * first.delay_ms > chunk_ms and most_held < needed:
        warnings.warn(
            f"a round trip takes {2 * first.delay_ms:.1f} ms and a microbatch {chunk_ms:.1f} ms on this worker, but "
            f"the schedule has only {most_held} microbatches in flight, so workers wait: thinpipe.Schedule1F1B has as "
            f"many as needed (here {needed} of {chunks}), ScheduleGPipe all",
            stacklevel=2,
        )
