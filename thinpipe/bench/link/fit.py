"""What follows from times of messages: the line latency + bytes / bandwidth, and where a codec stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Line:
    """The time of a message as a function of its size."""

    latency_ms: float
    bytes_per_ms: float

    def ms(self, size: float) -> float:
        return self.latency_ms + size / self.bytes_per_ms


def fit_line(sizes: Sequence[float], times_ms: Sequence[float]) -> Line | None:
    """The line with the least squared error, where an error weighs less the longer a message takes.

    Weights are 1 / time: large messages say what the bandwidth is, and small ones what the latency is. None where sizes
    are all the same, or times do not grow with them.
    """
    x, t = np.asarray(sizes, float), np.asarray(times_ms, float)
    if len(set(sizes)) < 2 or t.min() <= 0:
        return None
    rows = np.stack([np.ones_like(x), x], axis=1) / np.sqrt(t)[:, None]
    (latency, slope), *_ = np.linalg.lstsq(rows, np.sqrt(t), rcond=None)
    if latency < 0:  # no message arrives before it is sent: the line goes through zero
        latency, slope = 0.0, float(np.sum(x) / np.sum(x**2 / t))
    return Line(float(latency), 1 / float(slope)) if slope > 0 else None


def pays_below_mbit_per_s(tensor_bytes: int, wire_bytes: int, codec_ms: float) -> float | None:
    """The rate at which a codec saves as much time on the link as encoding and decoding take.

    8 MB sent as 2 MB save 6 MB; if the codec takes 6 ms, that is 1 MB per ms, 8000 Mbit/s: a faster link does not gain.
    None where nothing is saved, or it costs nothing.
    """
    saved = tensor_bytes - wire_bytes
    return saved * 8 / codec_ms / 1e3 if saved > 0 and codec_ms > 0 else None
