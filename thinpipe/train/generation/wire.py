"""Messages of generation: one per step travels around the ring from the client through all servers and back.

    header | rejected tokens of each text | mask of the new tokens | their positions | encoded states | checksum

The size of a message follows from the numbers of texts and tokens. A control message, which has a header only,
announces both for a new batch, and every message the number of tokens per text of the next one: 1, or the size of a
block with drafts. So a receiver knows the size of the next message in advance and posts its receive while it computes:
gloo transfers nothing before that.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from thinpipe.codecs.base import Codec, as_bytes
from thinpipe.codecs.rounding import rounding_key
from thinpipe.comm.errors import ChecksumError
from thinpipe.comm.group import Work, link_errors
from thinpipe.links.link_codec import WireFormat
from thinpipe.links.message import CHECKSUM_BYTES, is_intact, seal
from thinpipe.links.slot import Slot
from thinpipe.train.engines.world import World
from thinpipe.train.models.decoding import Step

_NUMBERS = struct.Struct("<8I")
CONTROL_BYTES = _NUMBERS.size + CHECKSUM_BYTES  # of a control message
_TAG = 1 << 29  # distinct from the tags of links, which have bit 30, and of users, which are small


class Kind(IntEnum):
    """The type of a message."""

    BEGIN = 1  # control message: a batch begins, with this number of texts and of tokens per prompt
    STATES = 2
    LAST = 3  # the end of a batch; without content
    QUIT = 4  # control message: there are no more batches


@dataclass(frozen=True)
class Head:
    """The header of a message: its fields are sent in this order."""

    kind: Kind
    number: int = 0  # sequence number of the message in its batch
    texts: int = 0
    tokens: int = 0
    next_tokens: int = 1  # of the next message of the batch
    has_mask: bool = False
    has_positions: bool = False
    encoded: bool = False  # True: states are encoded by the codec

    def write(self, message: Tensor) -> None:
        _NUMBERS.pack_into(message.numpy().data, 0, *astuple(self))

    @staticmethod
    def read(message: Tensor) -> Head:
        kind, *numbers = _NUMBERS.unpack_from(message.numpy().data)
        return Head(Kind(kind), *numbers[:4], *map(bool, numbers[4:]))

    @property
    def has_drafts(self) -> bool:
        return self.next_tokens > 1

    @property
    def removes(self) -> bool:
        """True if tokens of the preceding message are removed from the caches first."""
        return self.has_drafts and self.number > 1

    def following(self) -> Head:
        """Return a header with the sizes of the next message."""
        return replace(self, tokens=self.next_tokens)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest batch of a run; no message of a peer makes this worker allocate more."""

    texts: int
    tokens: int  # per text

    @classmethod
    def of(cls, facts: Mapping[str, Any], *, batch_size: int | None, max_tokens: int | None) -> Limits:
        """Return the sizes that the client announced (``prompts``, ``longest``), limited by options and model."""
        texts, tokens = int(facts.get("prompts", 0)), max(int(facts.get("longest", 0)), int(facts.get("block", 0)))
        return cls(texts=min(texts, batch_size or texts), tokens=min(tokens, max_tokens or tokens))

    def check(self, head: Head, worker: int) -> None:
        """Raise ChecksumError for a larger batch."""
        tokens = max(head.tokens, head.next_tokens)
        if head.texts > self.texts or tokens > self.tokens:
            raise ChecksumError(
                f"worker {worker} announced {head.texts} texts of {tokens} tokens, and {self.texts} of "
                f"{self.tokens} are the most of this run: rejected. Start all workers with the same options"
            )


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The conversion of steps to messages and back on one hop of the ring."""

    states: tuple[Slot, ...]  # of one token
    codec: Codec
    seed: int
    source: int  # the sending worker

    def size(self, head: Head) -> int:
        wires = sum(form.wire_bytes for _, form in self._forms(head))
        return _NUMBERS.size + head.texts * (4 + 5 * head.tokens) + wires + CHECKSUM_BYTES

    def pack(self, head: Head, step: Step | None) -> Tensor:
        """Return a message in host memory, without its checksum."""
        message = torch.zeros(self.size(head), dtype=torch.uint8)
        head.write(message)
        if step is None:
            return message
        rejected, mask, positions, wires = self._parts(message, head)
        if step.rejected is not None:
            rejected.copy_(as_bytes(torch.tensor(step.rejected, dtype=torch.int32)))
        if step.mask is not None:
            mask.copy_(step.mask)
        if step.positions is not None:
            positions.copy_(as_bytes(step.positions.to(torch.int32).contiguous()))
        for number, (state, wire, (_, form)) in enumerate(zip(step.states, wires, self._forms(head), strict=True)):
            if form.codec is None:
                wire.copy_(as_bytes(state.detach().contiguous()))
            else:
                key = rounding_key(self.seed, self.source, number, head.number)
                wire.copy_(form.codec.encode(state, key=key))
        return message

    def unpack(self, message: Tensor, head: Head, device: torch.device) -> Step:
        rejected, mask, positions, wires = self._parts(message, head)
        shape, states = (head.texts, head.tokens), []
        for wire, (slot, form) in zip(wires, self._forms(head), strict=True):
            state = torch.empty(slot.shape, dtype=slot.dtype, device=device)
            if form.codec is None:
                as_bytes(state).copy_(wire)
            else:
                form.codec.decode(wire.clone().to(device), state)
            states.append(state)
        return Step(
            states=tuple(states),
            mask=mask.to(device, torch.int64) if head.has_mask else None,
            positions=positions.clone().view(torch.int32).view(shape).to(device, torch.int64)
            if head.has_positions
            else None,
            rejected=tuple(rejected.clone().view(torch.int32).tolist())
            if head.has_drafts and head.number > 1
            else None,
        )

    def _forms(self, head: Head) -> Sequence[tuple[Slot, WireFormat]]:
        return _forms(self.states, self.codec if head.encoded else None, head.texts, head.tokens)

    def _parts(self, message: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
        count = head.texts * head.tokens
        lengths = (form.wire_bytes for _, form in self._forms(head))
        sizes = [_NUMBERS.size, 4 * head.texts, count, 4 * count, *lengths, CHECKSUM_BYTES]
        _, rejected, mask, positions, *wires, _ = message.split(sizes)
        return rejected, mask.view(head.texts, head.tokens), positions, wires


@lru_cache(maxsize=64)  # the same for every token after the first
def _forms(states: tuple[Slot, ...], codec: Codec | None, texts: int, tokens: int) -> Sequence[tuple[Slot, WireFormat]]:
    slots = [Slot(torch.Size((texts, tokens, *each.shape)), each.dtype) for each in states]
    return [(slot, WireFormat.of(slot, codec)) for slot in slots]


class Ring:
    """This worker's position in the ring: it receives from the preceding worker and sends to the next one."""

    def __init__(self, world: World, limits: Limits) -> None:
        self._group, self._limits = world.control, limits
        self._before, self._next = (world.worker - 1) % world.workers, (world.worker + 1) % world.workers
        self._incoming: tuple[Tensor, Work] | None = None
        self._outgoing: tuple[Tensor, Work] | None = None
        self.sent_bytes = 0
        self.busy_s = [0.0, 0.0]  # this server's compute time, for prompts and for the tokens that follow

    def post(self, size: int) -> None:
        """Post a receive for a message of ``size`` bytes."""
        buffer = torch.empty(size, dtype=torch.uint8)
        self._incoming = buffer, self._group.irecv(buffer, self._before, _TAG)

    def take(self) -> tuple[Head, Tensor]:
        """Wait for the posted message; raise ChecksumError for one that is damaged or too large."""
        assert self._incoming is not None
        message, work = self._incoming
        self._incoming = None
        with link_errors(f"receiving from worker {self._before}"):
            work.wait()
        head = Head.read(message) if is_intact(message, 0, 0, self._before) else None
        if head is None:
            raise ChecksumError(
                f"what worker {self._before} sent was changed on its way: its checksum does not match. Look for errors "
                "of the network or of memory, then start again"
            )
        self._limits.check(head, self._before)
        return head, message

    def send(self, message: Tensor) -> None:
        """Send a message when the preceding send is complete."""
        self.flush()
        seal(message, 0, 0, self._group.rank)
        self._outgoing = message, self._group.isend(message, self._next, _TAG)
        self.sent_bytes += message.numel()

    def send_control(self, head: Head) -> None:
        """Send a control message."""
        message = torch.zeros(CONTROL_BYTES, dtype=torch.uint8)
        head.write(message)
        self.send(message)

    def flush(self) -> None:
        if self._outgoing is not None:
            with link_errors(f"sending to worker {self._next}"):
                self._outgoing[1].wait()
            self._outgoing = None


class Servers:
    """The client's view of all servers: a callable that sends states and returns the results."""

    def __init__(self, ring: Ring, outgoing: Packing, incoming: Packing, device: torch.device) -> None:
        self._ring, self._outgoing, self._incoming, self._device = ring, outgoing, incoming, device
        self._head = Head(kind=Kind.LAST)
        self.wait_s = [0.0, 0.0]  # time until states return, for prompts and for the tokens that follow
        self.last_wait_s = 0.0
        self.rejected: tuple[int, ...] | None = None  # by text: for the next step
        self.meanwhile: Callable[[], None] | None = None  # called while states are on their way

    def begin(self, *, encoded: bool, block: int = 1) -> None:
        """Mark the next step as the first of a batch; those after it have ``block`` tokens per text."""
        self._head = Head(kind=Kind.BEGIN, encoded=encoded, next_tokens=block)
        self.rejected = None

    def __call__(self, step: Step) -> tuple[Tensor, ...]:
        texts, tokens = step.states[0].shape[:2]
        head = replace(self._head, texts=texts, tokens=tokens)
        if head.kind is Kind.BEGIN:
            self._ring.send_control(head)
        else:
            assert tokens == head.next_tokens, "a key-value cache is continued by blocks of one size"
        head = replace(
            head,
            kind=Kind.STATES,
            number=head.number + 1,
            has_mask=step.mask is not None,
            has_positions=step.positions is not None,
        )
        self._head = head
        self._ring.post(self._incoming.size(head))
        self._ring.send(self._outgoing.pack(head, replace(step, rejected=self.rejected)))
        began = time.perf_counter()
        if self.meanwhile is not None:
            self.meanwhile()
        _, message = self._ring.take()
        self.last_wait_s = time.perf_counter() - began
        self.wait_s[head.number > 1] += self.last_wait_s
        return self._incoming.unpack(message, head, self._device).states

    def end(self) -> None:
        """Mark the end of the batch and notify the servers."""
        if self._head.kind is Kind.STATES:
            self._ring.send(self._outgoing.pack(replace(self._head.following(), kind=Kind.LAST), None))
        self._head = Head(kind=Kind.LAST)

    def quit(self) -> None:
        self._ring.send_control(Head(kind=Kind.QUIT))
        self._ring.flush()
