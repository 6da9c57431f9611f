"""The base class of both link ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from thinpipe.links.activation_cache import SentSamples
from thinpipe.links.counters import Counters, DeviceClock, Event, Ledger, LinkEnd
from thinpipe.links.link_codec import LinkCodec
from thinpipe.links.message import is_packed
from thinpipe.links.slot import Route, Slot
from thinpipe.links.transport import transport

Tap = Callable[["Link", int, int, Tensor], None]  # link, chunk, slot, tensor to be sent


class Link:
    """One end of a link: a link codec produces the wires, a transport moves them."""

    tap: Tap | None = None  # of a sender: called with every tensor before it is encoded
    trace = False  # at a receiver, also record arrival times: one thread per message
    times_first = False  # at a receiver, record the arrival time of the first chunk of every step
    sent: SentSamples | None = None  # if chunks whose samples were sent before are not sent again

    def __init__(self, codec: LinkCodec, route: Route, events: list[Event], *, scheduled: bool = False) -> None:
        self.codec, self.route, self.device = codec, route, route.device
        self.source, self.target, self.direction = route.source, route.target, route.direction
        codec.attach(route)
        self.slots: list[Slot] = []
        self.integers: dict[Slot, torch.dtype] = {}  # the dtypes of slots whose tensors are sent as packed integers
        self.chunks = self.step = 0
        self.events = events  # the stage's
        self.ledger = Ledger()
        self.clock = DeviceClock(route.device)  # of the codec
        self.transport = transport(route, self.ledger, scheduled=scheduled)
        self.drop_buffers()

    def configure(self, slots: list[Slot], chunks: int) -> None:
        """Set the slots and the chunks per step, before the first step or when they change."""
        if (slots, chunks) != (self.slots, self.chunks):
            self.drop_buffers()
        self.route.check_limits(chunks, len(slots))
        self.slots, self.chunks = slots, chunks
        stays = self.route.handover is not None
        packed = [] if stays else [slot for slot in slots if is_packed(slot.dtype, self.route.group, self.device)]
        self.integers = {slot: slot.dtype for slot in packed}
        self.codec.configure(slots, chunks)

    def all_messages(self) -> Iterator[tuple[int, int]]:
        """Yield the chunk and slot of every message of a step."""
        return itertools.product(range(self.chunks), range(len(self.slots)))

    def skips(self, chunk: int) -> bool:
        """Return True if a chunk of the current step is not sent."""
        return self.sent is not None and self.sent.has(chunk)

    @property
    def is_prefetched(self) -> bool:
        """True if receives are posted before a step begins: before the samples that are sent in it are known."""
        return self.transport.ahead and self.sent is None

    def drop_buffers(self) -> None:
        """Drop all buffers: they belong to other slots."""

    def begin_step(self, step: int) -> None:
        """Begin a step: buffers still held by the last step are released."""
        self.step = step
        self.transport.begin_step()

    def expect_step(self) -> None:
        """Prepare for the messages of the next step before it begins."""

    def cancel_prefetch(self) -> None:
        """Cancel the step that was expected: all senders first, then all receivers."""

    def first_times(self) -> tuple[float, int] | None:
        """Return when the first chunk of the last step was sent or had arrived, and its bytes; None if it was not.

        The link was idle until then, so the time between the two ends is the delay and the transmission.
        """
        stamps = itertools.islice(reversed(self.ledger.stamps), len(self.slots) * self.chunks)
        first = [stamp for stamp in stamps if (stamp.step, stamp.chunk) == (self.step, 0)]
        if not first or not (self.transport.ahead and self.sent is None):
            return None
        times = [stamp.end if stamp.arrived is None else stamp.arrived for stamp in first]
        return max(times), sum(stamp.wire_bytes for stamp in first)

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
