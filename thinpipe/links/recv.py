"""The receiving end of a link: waits for wires, decodes them, and updates counters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.links.activation_cache import SampleCodec
from thinpipe.links.counters import Event, Stamp, now
from thinpipe.links.link import Link
from thinpipe.links.message import Message


class RecvLink(Link):
    """A link end that receives into persistent buffers and decodes into tensors that it lends and reuses."""

    def drop_buffers(self) -> None:
        self._messages: dict[tuple[int, int], Message] = {}  # by chunk and slot
        self._spare: dict[int, list[Tensor]] = {}  # by slot, to decode into

    def expect_step(self) -> None:
        """(0) Post the receives of the next step before it begins, when message lengths are not known yet."""
        for chunk, index in self.all_messages() if self.is_prefetched else ():
            message = self._message(chunk, index)
            message.buffer = message.storage
            self.transport.memory.reuse(message)
            self.transport.start(message)

    def cancel_prefetch(self) -> None:
        """Cancel that step: wait for the one-byte messages that the sender sends instead."""
        for message in self._messages.values():
            if message.work is not None:
                self.transport.await_work(message)

    def post(self) -> None:
        """(1) Post the receives of a step, if the transport posts receives ahead."""
        expected = (numbers for numbers in self.all_messages() if not self.skips(numbers[0]))
        traced = self.chunks if self.trace else int(self.times_first)
        self.transport.post((self._expect(*numbers) for numbers in expected), traced)

    def recv_ops(self, chunk: int) -> list[dist.P2POp]:
        """Return the receive operations of one chunk, for a schedule that orders and awaits them."""
        indices = () if self.skips(chunk) else range(len(self.slots))
        return self.transport.recv_ops(self._expect(chunk, index) for index in indices)

    def receive(self, chunk: int) -> list[Tensor]:
        """(3) Wait for a chunk and decode it."""
        if self.skips(chunk):
            return [self._recall(self._message(chunk, index)) for index in range(len(self.slots))]
        tensors = []
        for index, slot in enumerate(self.slots):
            message = self._messages[chunk, index]
            self.transport.receive(message)
            tensors.append(self._decode(message))
            size, needed, usable = len(message.buffer), message.needed, message.usable
            self.ledger.packing_ms += message.packing_ms
            self.ledger.counters.count(slot.tensor_bytes, size)
            self.ledger.counters.blocked_ms += (usable - needed) * 1e3
            self.ledger.stamps.append(Stamp(self.step, chunk, index, needed, usable, message.arrived, size))
            self.events.append(Event("wait", self.target, chunk, needed, usable))
            if not message.raw:
                self.events.append(Event("decode", self.target, chunk, usable, now()))
        return tensors

    def begin_step(self, step: int) -> None:
        """Begin a step; reclaim tensors still lent by a step without a backward, an evaluation."""
        super().begin_step(step)
        for message in self._messages.values():
            self._reclaim(message)

    def release(self, chunk: int) -> None:
        """(5) Reclaim the tensors of a chunk whose backward is done."""
        for index in range(len(self.slots)):
            if not self._messages[chunk, index].kept:
                self._reclaim(self._messages[chunk, index])

    def keep_shared(self, chunk: int, values: Iterable[Any]) -> None:
        """Keep the memory of a chunk to the end of the step if any of these tensors shares it.

        This happens to outputs and input gradients if a module returns its input or a view of it (``nn.Identity``).
        """
        addresses = {value.untyped_storage().data_ptr() for value in values if type(value) is Tensor}
        for index in range(len(self.slots)):
            message = self._messages[chunk, index]
            message.kept = message.lent is not None and message.lent.untyped_storage().data_ptr() in addresses

    def _reclaim(self, message: Message) -> None:
        if message.lent is not None:
            self._spare.setdefault(message.slot, []).append(message.lent)
            message.lent = None
        message.kept = False

    def _message(self, chunk: int, index: int) -> Message:
        """Return the message of a chunk and slot for any step, with a receive buffer."""
        memory, message = self.transport.memory, self._messages.get((chunk, index))
        if message is None:
            integers = self.integers.get(self.slots[index])
            message = self._messages[chunk, index] = Message(self.step, chunk, index, integers=integers)
            if self.route.handover is None:  # otherwise the sender's memory is used
                most = memory.max_bytes(self.codec.max_bytes(index), packed=integers is not None)
                message.storage = memory.buffer(most)
        return message

    def _expect(self, chunk: int, index: int) -> Message:
        """Return the message of a chunk and slot for the current step."""
        memory, message = self.transport.memory, self._message(chunk, index)
        wire_format = self.codec.wire_format(chunk, index)
        message.step, message.size, message.raw = self.step, wire_format.wire_bytes, wire_format.raw
        message.buffer = message.storage[
            : memory.max_bytes(wire_format.wire_bytes, packed=message.integers is not None)
        ]
        return message

    def _decode(self, message: Message) -> Tensor:
        chunk, index, memory = message.chunk, message.slot, self.transport.memory
        slot, wire = self.slots[index], memory.open(message)
        if message.raw and memory.in_place:
            received = wire.view(slot.dtype).view(slot.shape).detach()  # autograd refuses to detach views in place
            self.codec.observe_raw(chunk, index, received)
            return received
        message.lent = self._lend(index)
        with self.clock.measure() if not message.raw else nullcontext():
            self.codec.decode(chunk, index, wire, message.lent)
        memory.close(message)
        return message.lent.detach()  # a new leaf every time: gradients of the previous use must not carry over

    def _recall(self, message: Message) -> Tensor:
        """Decode a tensor that was sent in an earlier step."""
        assert isinstance(self.codec, SampleCodec)
        message.lent = self._lend(message.slot)
        with self.clock.measure():
            self.codec.recall(message.chunk, message.slot, message.lent)
        return message.lent.detach()

    def _lend(self, index: int) -> Tensor:
        slot, spares = self.slots[index], self._spare.get(index)
        return spares.pop() if spares else torch.empty(slot.shape, dtype=slot.dtype, device=self.device)
