"""The base class of both link ends, and the transport of links within one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.links.counters import Counters, DeviceClock, Event, Ledger, LinkEnd, now
from thinpipe.links.encoding import Encoding
from thinpipe.links.memory import InPlace
from thinpipe.links.message import Message, is_packed
from thinpipe.links.slot import Route, Slot
from thinpipe.links.transport import Transport, transport


class Link:
    """One end of a link: an encoding produces the wires, a transport moves them."""

    def __init__(self, encoding: Encoding, route: Route, events: list[Event], *, scheduled: bool = False) -> None:
        self.encoding, self.route = encoding, route
        encoding.attach(route)
        self.slots: list[Slot] = []
        self.chunks = self.step = 0
        self.events = events  # the stage's
        self.ledger = Ledger()
        self.clock = DeviceClock(route.device)  # of the codec
        if route.handover is None:
            self.transport = transport(route, self.ledger, scheduled=scheduled)
        else:
            self.transport = LocalTransport(route, InPlace(route), self.ledger)
        self.forget()

    @property
    def source(self) -> int:
        return self.route.source

    @property
    def target(self) -> int:
        return self.route.target

    @property
    def direction(self) -> str:
        return self.route.direction

    @property
    def device(self) -> torch.device:
        return self.route.device

    def configure(self, slots: list[Slot], chunks: int) -> None:
        """Set the slots and the chunks per step, before the first step or when they change."""
        if (slots, chunks) != (self.slots, self.chunks):
            self.forget()
        self.route.check_limits(chunks, len(slots))
        self.slots, self.chunks = slots, chunks
        self.encoding.configure(slots, chunks)

    def all_messages(self) -> Iterator[tuple[int, int]]:
        """Yield the chunk and slot of every message of a step."""
        return itertools.product(range(self.chunks), range(len(self.slots)))

    def forget(self) -> None:
        """Drop all buffers: they belong to other slots."""

    def begin_step(self, step: int) -> None:
        """Begin a step: buffers still held by the last step are released."""
        self.step = step
        self.encoding.begin_step(step)
        self.transport.begin_step()

    def begin_samples(self, samples: Tensor | None) -> None:
        """Set the samples of the step about to start; None: an evaluation."""
        self.encoding.begin_samples(samples, self.chunks)

    def integers(self, slot: Slot) -> torch.dtype | None:
        """Return the dtype of a slot whose tensors are sent as packed integers; None for other slots."""
        stays = self.route.handover is not None
        return slot.dtype if not stays and is_packed(slot.dtype, self.route.group, self.device) else None

    def counters(self) -> Counters:
        """Return the sums so far. On a GPU this synchronizes with pending work, so call it between steps."""
        spent = self.clock.total_ms() + self.ledger.packing_ms
        if self.route.sends:
            self.ledger.counters.encode_ms = spent
        else:
            self.ledger.counters.decode_ms = spent
        return self.ledger.counters

    def end(self) -> LinkEnd:
        """Return the record of this end that is sent to the other workers."""
        return LinkEnd(self.route.sends, self.source, self.target, self.counters(), tuple(self.ledger.stamps))

    def reset_counters(self) -> None:
        self.ledger.reset()
        self.clock.reset()

    def __str__(self) -> str:
        return str(self.route)


class LocalTransport(Transport):
    """The transport between two ends in one process: the wire that is sent is the wire that is received."""

    ahead = False

    def begin_step(self) -> None:
        """Do nothing: no message is in transit."""

    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        assert self.route.handover is not None
        self.seal(messages)
        for message in messages:
            self.route.handover[self.route.tag(message.chunk, message.slot)] = message.buffer
        return []

    def await_sends(self, but: int = 0) -> None:
        """Do nothing: all messages have arrived."""

    def post(self, messages: Iterable[Message], trace: bool) -> None:
        list(messages)  # iterating registers each in its link; the sender's memory is used

    def recv_ops(self, messages: Iterable[Message]) -> list[dist.P2POp]:
        return []

    def receive(self, message: Message) -> None:
        assert self.route.handover is not None
        message.needed = message.usable = now()
        message.room = message.buffer = self.route.handover.pop(self.route.tag(message.chunk, message.slot))
