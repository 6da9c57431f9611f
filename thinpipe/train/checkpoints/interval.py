"""Checkpoint intervals: a number of steps or a time; by default the end of an epoch and every ten minutes."""

from __future__ import annotations

import re
import time

from thinpipe.options import Rule

DEFAULT_S = 600.0
_UNITS = {"s": 1, "min": 60, "h": 3600}
_TIME = re.compile(rf"(\d{{1,6}}(?:\.\d{{1,3}})?)\s*({'|'.join(_UNITS)})")


def parse_interval(text: str) -> int | str:
    """Return a number of steps, or a time as the user wrote it, which is stored in manifests."""
    text = text.strip()
    return int(text) if text.isdecimal() else text


def _interval_s(interval: int | str | None) -> float | None:
    """Return the seconds from one checkpoint to the next; None if only steps count."""
    if interval is None:
        return DEFAULT_S
    match = None if isinstance(interval, int) else _TIME.fullmatch(interval)
    return None if match is None else float(match[1]) * _UNITS[match[2]]


INTERVAL = Rule(
    "a number of steps, or a time as in 30s, 10min or 2h",
    lambda given: 0 < given <= 1_000_000_000 if isinstance(given, int) else bool(_interval_s(given)),
)


class SaveTimer:
    """A timer for the next checkpoint."""

    def __init__(self, interval: int | str | None, steps_per_epoch: int) -> None:
        self._seconds = _interval_s(interval)
        self._steps = steps_per_epoch if interval is None else interval if isinstance(interval, int) else None
        self._began = time.monotonic()

    def is_due(self) -> bool:
        """Return True if the time has passed by this worker's clock. Only the client's clock may decide."""
        return self._seconds is not None and time.monotonic() - self._began >= self._seconds

    def is_due_after(self, step: int) -> bool:
        return self._steps is not None and step % self._steps == 0

    def restart(self) -> None:
        self._began = time.monotonic()
