"""Where wires lie: on the stage's device, where codecs write and read them, and where a backend does.

For a CPU under gloo and a GPU under NCCL that is one place (``InPlace``). A GPU's wires travel through gloo by way of
pinned host memory (``Pinned``), with a stream of its own for the copies:

    sender      encode on the GPU    (1) load: copy to the host      checksum, send
    receiver    arrives, checksum    (2) unload: copy to the GPU     (3) open: decode there, then (4) close

The stream of the copies waits for the encoding before (1), and before (2) for (4) of the step before. The stream that
computes waits for (2) in (3). So neither the worker nor the stream it computes on waits for a copy that nothing needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from thinpipe.links.message import Message, checksum_bytes, most_bytes
from thinpipe.links.slot import Route


def _nothing() -> None:
    """There is nothing to wait for."""


class InPlace:
    """One place for both. Buffers of sent messages are used again, by size."""

    in_place: ClassVar[bool] = True  # a tensor that travelled raw can be used where it arrived

    def __init__(self, route: Route) -> None:
        self.device = route.device
        self.checksum_bytes = 0 if route.handover is not None else checksum_bytes(route.group, route.device)
        self._spare: dict[int, list[Tensor]] = {}

    def buffer(self, size: int) -> Tensor:
        """New memory that the backend reads and writes."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def most_bytes(self, wire_bytes: int, *, packed: bool) -> int:
        return most_bytes(wire_bytes, packed=packed, checksum=self.checksum_bytes)

    # The sending end

    def wire(self, message: Message) -> Tensor:
        """Where to encode a message."""
        self._make_room(message)
        return message.room[: message.size]

    def load(self, message: Message, wire: Tensor) -> None:
        """Bring a wire where the backend reads it: one that was encoded into ``wire()``, or a tensor's own bytes."""
        if not message.raw:
            return
        if self.checksum_bytes:
            self._make_room(message)
            message.room[: message.size].copy_(wire)
        else:
            message.buffer, message.borrowed = wire, True

    def loaded(self) -> Callable[[], None]:
        """A call that waits until what was loaded so far is where the backend reads it, from any thread."""
        return _nothing

    def recycle(self, message: Message) -> None:
        """It has left."""
        if not message.borrowed:
            self._spare.setdefault(message.room.numel(), []).append(message.room)

    def forget(self) -> None:
        """Messages will have other sizes."""
        self._spare.clear()

    def _make_room(self, message: Message) -> None:
        size = self.most_bytes(message.size, packed=message.integers is not None)
        spares = self._spare.get(size)
        message.room = message.buffer = spares.pop() if spares else self.buffer(size)

    # The receiving end

    def reuse(self, message: Message) -> None:
        """Wait until what arrived in the last step may be overwritten."""

    def unload(self, message: Message) -> None:
        """Bring a message that arrived where it can be decoded."""

    def open(self, message: Message) -> Tensor:
        """The wire, for the codec."""
        return message.room[: message.size]

    def close(self, message: Message) -> None:
        """The codec has read it."""


class Pinned(InPlace):
    """Wires of a GPU in pinned host memory."""

    in_place = False

    def __init__(self, route: Route) -> None:
        super().__init__(route)
        self._copier = torch.cuda.Stream(self.device)

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def wire(self, message: Message) -> Tensor:
        return torch.empty(message.size, dtype=torch.uint8, device=self.device)

    def load(self, message: Message, wire: Tensor) -> None:
        """(1)"""
        self._copier.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copier):
            wire.record_stream(self._copier)
            self._make_room(message)
            message.room[: message.size].copy_(wire, non_blocking=True)

    def loaded(self) -> Callable[[], None]:
        left = torch.cuda.Event()
        left.record(self._copier)
        return left.synchronize

    def reuse(self, message: Message) -> None:
        if message.copied is not None:
            message.copied.synchronize()

    def unload(self, message: Message) -> None:
        """(2), in whatever thread saw the message arrive."""
        with torch.cuda.stream(self._copier):
            if message.decoded is not None:
                self._copier.wait_event(message.decoded)
            if message.on_device is None:
                message.on_device = torch.empty(len(message.room), dtype=torch.uint8, device=self.device)
            message.on_device[: message.size].copy_(message.room[: message.size], non_blocking=True)
            message.copied = torch.cuda.Event()
            message.copied.record()

    def open(self, message: Message) -> Tensor:
        """(3)"""
        assert message.on_device is not None
        assert message.copied is not None
        torch.cuda.current_stream(self.device).wait_event(message.copied)
        return message.on_device[: message.size]

    def close(self, message: Message) -> None:
        """(4)"""
        message.decoded = torch.cuda.Event()
        message.decoded.record()
