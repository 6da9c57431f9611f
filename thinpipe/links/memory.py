"""Wire buffers: on the stage's device, for codecs, and in the memory that a backend reads and writes.

For a CPU with gloo and a GPU with NCCL both are the same memory (``InPlace``). With gloo, a GPU's wires are sent
through pinned host memory (``Pinned``), with a separate stream for the copies:

    sender      encode on the GPU    (1) load: copy to the host      checksum, send
    receiver    arrives, checksum    (2) unload: copy to the GPU     (3) open: decode there, then (4) close

The copy stream waits for the encoding before (1), and for (4) of the previous step before (2). The compute stream
waits for (2) in (3). So neither the worker nor its compute stream waits for a copy that is not needed yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from thinpipe.links.message import Message, checksum_bytes, max_bytes
from thinpipe.links.slot import Route


def _nothing() -> None:
    """Return without waiting."""


class InPlace:
    """One buffer for codec and backend. Buffers of sent messages are reused, by size."""

    in_place: ClassVar[bool] = True  # a tensor that was sent raw can be used in the receive buffer

    def __init__(self, route: Route) -> None:
        self.device = route.device
        self.checksum_bytes = 0 if route.handover is not None else checksum_bytes(route.group, route.device)
        self._spare: dict[int, list[Tensor]] = {}

    def buffer(self, size: int) -> Tensor:
        """Return new memory that the backend can read and write."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def max_bytes(self, wire_bytes: int, *, packed: bool) -> int:
        return max_bytes(wire_bytes, packed=packed, checksum=self.checksum_bytes)

    # The sending end

    def wire(self, message: Message) -> Tensor:
        """Return the buffer to encode a message into."""
        self._allocate(message)
        return message.storage[: message.size]

    def load(self, message: Message, wire: Tensor) -> None:
        """Move a wire to the backend's memory: one that was encoded into ``wire()``, or a tensor's raw bytes."""
        if not message.raw:
            return
        if self.checksum_bytes:
            self._allocate(message)
            message.storage[: message.size].copy_(wire)
        else:
            message.buffer, message.borrowed = wire, True

    def loaded(self) -> Callable[[], None]:
        """Return a function that waits until all loads so far have completed; any thread may call it."""
        return _nothing

    def recycle(self, message: Message) -> None:
        """Make the buffer of a sent message available for reuse."""
        if not message.borrowed:
            self._spare.setdefault(message.storage.numel(), []).append(message.storage)

    def drop_buffers(self) -> None:
        """Drop the spare buffers: messages will have other sizes."""
        self._spare.clear()

    def _allocate(self, message: Message) -> None:
        size = self.max_bytes(message.size, packed=message.integers is not None)
        spares = self._spare.get(size)
        message.storage = message.buffer = spares.pop() if spares else self.buffer(size)

    # The receiving end

    def reuse(self, message: Message) -> None:
        """Wait until the message of the last step may be overwritten."""

    def unload(self, message: Message) -> None:
        """Move a received message to the memory where it can be decoded."""

    def open(self, message: Message) -> Tensor:
        """Return the wire for the codec."""
        return message.storage[: message.size]

    def close(self, message: Message) -> None:
        """Mark a message as decoded."""


class Pinned(InPlace):
    """Buffers in pinned host memory for the wires of a GPU."""

    in_place = False

    def __init__(self, route: Route) -> None:
        super().__init__(route)
        self._copier = torch.cuda.Stream(self.device)

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def wire(self, message: Message) -> Tensor:
        return torch.empty(message.size, dtype=torch.uint8, device=self.device)

    def load(self, message: Message, wire: Tensor) -> None:
        """Copy a wire to the host, (1)."""
        self._copier.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copier):
            wire.record_stream(self._copier)
            self._allocate(message)
            message.storage[: message.size].copy_(wire, non_blocking=True)

    def loaded(self) -> Callable[[], None]:
        left = torch.cuda.Event()
        left.record(self._copier)
        return left.synchronize

    def reuse(self, message: Message) -> None:
        if message.copied is not None:
            message.copied.synchronize()

    def unload(self, message: Message) -> None:
        """Copy a message to the GPU, (2), in the thread that received it."""
        with torch.cuda.stream(self._copier):
            if message.decoded is not None:
                self._copier.wait_event(message.decoded)
            if message.on_device is None:
                message.on_device = torch.empty(len(message.storage), dtype=torch.uint8, device=self.device)
            message.on_device[: message.size].copy_(message.storage[: message.size], non_blocking=True)
            message.copied = torch.cuda.Event()
            message.copied.record()

    def open(self, message: Message) -> Tensor:
        """Return the wire on the GPU; the compute stream waits for the copy, (3)."""
        assert message.on_device is not None
        assert message.copied is not None
        torch.cuda.current_stream(self.device).wait_event(message.copied)
        return message.on_device[: message.size]

    def close(self, message: Message) -> None:
        """Record that a message is decoded, (4)."""
        message.decoded = torch.cuda.Event()
        message.decoded.record()
