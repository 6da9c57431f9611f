"""The sending end of a link: encodes each tensor, sends the wire, and updates counters."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.codecs.base import as_bytes
from thinpipe.links.counters import Event, now
from thinpipe.links.link import Link
from thinpipe.links.message import Message
from thinpipe.links.slot import Slot


class SendLink(Link):
    """A link end that encodes into reused buffers."""

    warns = True  # warn if nothing is compressed; False if it is reported elsewhere
    window = 4  # chunks in transit before the worker waits for the oldest, whose wire takes memory

    def drop_buffers(self) -> None:
        self.transport.memory.drop_buffers()

    def configure(self, slots: list[Slot], chunks: int) -> None:
        super().configure(slots, chunks)
        why = self.codec.why_uncompressed(slots, chunks) if self.warns else None
        if why:
            self.warns = False
            warnings.warn(f"nothing is compressed on the {self}: {why}", stacklevel=2)

    def send(self, chunk: int, tensors: Sequence[Tensor]) -> list[dist.P2POp]:
        """(2) Encode and send, or return the operations that send. Block only if ``window`` chunks are in transit."""
        if self.skips(chunk):
            return []
        if len(tensors) != len(self.slots) or not all(isinstance(each, Tensor) for each in tensors):
            found = [str(Slot.of(each)) if isinstance(each, Tensor) else type(each).__name__ for each in tensors]
            raise ValueError(
                f"all chunks of all steps have the same tensors: the {self} was set up for "
                f"({', '.join(map(str, self.slots))}), but chunk {chunk} is ({', '.join(found)}). "
                "Return as many tensors for every chunk"
            )
        self.transport.await_sends(but=self.window - 1)
        return self.transport.send([self._encode(chunk, index, tensor) for index, tensor in enumerate(tensors)])

    def finish(self) -> None:
        """(4) Wait until all sends have completed."""
        self.transport.await_sends()

    def cancel_prefetch(self) -> None:
        """Cancel the step that the other end expects: send one byte in place of each message."""
        for numbers in self.all_messages() if self.is_prefetched else ():
            message = Message(self.step, *numbers, buffer=torch.zeros(1, dtype=torch.uint8))
            self.transport.start(message)
            self.transport.await_work(message)

    def _encode(self, chunk: int, index: int, tensor: Tensor) -> Message:
        slot, wire_format = self.slots[index], self.codec.wire_format(chunk, index)
        if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
            raise ValueError(
                f"all chunks of all steps have one shape: the {self} was set up for {slot}, but tensor {index} of "
                f"chunk {chunk} is {Slot.of(tensor)}. Pad or drop a batch that does not fill its chunks."
            )
        if self.tap is not None:
            self.tap(self, chunk, index, tensor)
        began = now()
        memory = self.transport.memory
        message = Message(
            self.step,
            chunk,
            index,
            slot.tensor_bytes,
            wire_format.wire_bytes,
            wire_format.raw,
            integers=self.integers.get(slot),
        )
        if wire_format.raw:
            wire = as_bytes(tensor.detach().contiguous())
            self.codec.observe_raw(chunk, index, tensor)
        else:
            wire = memory.wire(message)
            with self.clock.measure():
                self.codec.encode(chunk, index, tensor, wire)
        memory.load(message, wire)
        if not wire_format.raw:
            self.events.append(Event("encode", self.source, chunk, began, now()))
        return message
