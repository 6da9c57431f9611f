"""Counters of one link end: sums of bytes and times, and the time stamps that a report compares."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

now = time.perf_counter  # seconds; on Linux one clock for all processes of a machine

STAMPS = 1 << 14  # messages whose stamps are kept for the next report: 1000 steps of 16 chunks, 3 MB


@dataclass
class Counters:
    """Sums since the stage was created, or since ``reset``. A link end measures only its own half of the times."""

    messages: int = 0  # tensors sent or received
    tensor_bytes: int = 0  # their size before encoding or after decoding
    wire_bytes: int = 0  # their size on the wire
    encode_ms: float = 0.0  # sender: time in the codec
    decode_ms: float = 0.0  # receiver: time in the codec
    # Receiver: time blocked on messages; a report splits it into wait and transfer. Sender: time blocked until messages
    # were sent.
    blocked_ms: float = 0.0

    def count(self, tensor_bytes: int, wire_bytes: int) -> None:
        self.messages += 1
        self.tensor_bytes += tensor_bytes
        self.wire_bytes += wire_bytes


@dataclass(frozen=True)
class Stamp:
    """One message at one end of a link, in seconds of that worker's clock."""

    step: int
    chunk: int
    slot: int
    start: float  # sender: handed to the network; receiver: first needed
    end: float  # receiver: usable; sender: same as start
    arrived: float | None = None  # receiver, in traced steps only: arrival of its last byte
    wire_bytes: int = 0


@dataclass(frozen=True)
class Event:
    """A bar in the timeline of one step."""

    kind: str  # forward, backward, weight, encode, decode, wait
    stage: int
    chunk: int
    start: float
    end: float


@dataclass
class Ledger:
    """The counters and time stamps of one link end."""

    counters: Counters = field(default_factory=Counters)
    stamps: deque[Stamp] = field(default_factory=lambda: deque(maxlen=STAMPS))
    packing_ms: float = 0.0  # of integers, on the host

    def reset(self) -> None:
        self.counters, self.packing_ms = Counters(), 0.0
        self.stamps.clear()


@dataclass(frozen=True)
class LinkEnd:
    """The record of one link end that is sent to the other workers."""

    sends: bool
    source: int  # stages
    target: int
    counters: Counters
    stamps: tuple[Stamp, ...]
    worker: int = -1  # its rank; set by the worker that gathers link ends

    def to_json(self, offset: float) -> dict[str, Any]:
        """Return it as JSON with ``offset`` seconds added to all stamps: every worker has its own clock."""
        record = asdict(self)
        for stamp in record["stamps"]:
            for name in ("start", "end", "arrived"):
                stamp[name] = None if stamp[name] is None else stamp[name] + offset
        return record

    @staticmethod
    def from_json(record: dict[str, Any], worker: int) -> LinkEnd:
        counters, stamps = Counters(**record["counters"]), tuple(Stamp(**stamp) for stamp in record["stamps"])
        return LinkEnd(**record | {"counters": counters, "stamps": stamps, "worker": worker})


class DeviceClock:
    """A clock for codecs and modules that does not synchronize with a GPU: it records events and reads them later."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._ms = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._pending.append((start, end))
            if len(self._pending) > 256 and self._pending[127][1].query():
                self._drain(128)  # finished long ago: reading them does not block
        else:
            began = now()
            yield
            self._ms += (now() - began) * 1e3

    def total_ms(self) -> float:
        """Return all time measured so far. On a GPU this synchronizes with pending work, so call it between steps."""
        self._drain(len(self._pending))
        return self._ms

    def reset(self) -> None:
        self._pending.clear()
        self._ms = 0.0

    def _drain(self, count: int) -> None:
        for start, end in self._pending[:count]:
            end.synchronize()
            self._ms += start.elapsed_time(end)
        del self._pending[:count]
