"""The two ends of a link: what one stage sends to its neighbour in one direction, and what the neighbour receives.

       SendLink (stage 0)                                 RecvLink (stage 1)

                                                     (1)  post: one irecv per chunk and tensor, at the start of a step
  (2)  send: encode into a wire, isend  ---- wire --->    arrives while the worker computes something else
                                                     (3)  receive: wait for it, decode
  (4)  finish: all sends of the step are out         (5)  release: the decoded tensors may be used again

(1) is why transfers hide behind compute: gloo moves no data until the receiver has posted. Each message has its own
tag, so nothing depends on the order of messages and no order can deadlock. Backends without tags (NCCL) take another
road: both ends hand their operations to the schedule (``send_ops``, ``recv_ops``), which keeps them in order.

A GPU's wires travel through gloo by way of pinned host buffers. Copies have a stream of their own, and threads wait
for them: one hands a wire to gloo when it has left the GPU, others move what arrived onto the GPU at once. So neither
the worker nor the stream it computes on waits for a copy that nothing needs yet.

Times. ``blocked_ms`` is the time from (3), when the stage first needs a chunk, until it can use the wire. A message
carries nothing but its wire, so the receiver alone cannot tell a late sender from a slow link: both ends keep stamps,
and ``report`` compares them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.codecs.base import FLOATS, Codec, as_bytes
from thinpipe.codecs.delta import Delta
from thinpipe.codecs.rounding import rounding_key
from thinpipe.pipeline.checksum import checksum_bytes, is_intact, seal
from thinpipe.pipeline.copies import SampleCopies
from thinpipe.pipeline.counters import Counters, DeviceClock, Event, Ledger, Stamp, now
from thinpipe.workers.activity import waiting
from thinpipe.workers.backend import wire_device
from thinpipe.workers.errors import ChecksumError, LinkError

RAW_BELOW = 4096  # bytes; a smaller tensor fits in three Ethernet frames, encoding it saves nothing

# A tag names direction, sending stage, chunk and slot. Bit 30 keeps clear of the small tags users choose.
_STAGES, _CHUNKS, _SLOTS = 1 << 10, 1 << 14, 1 << 5

# Chunks a link has under way before its worker waits for the oldest: enough to keep the network busy while the next
# ones are computed, few enough that 1F1B keeps its promise about memory.
WINDOW = 4


@dataclass(frozen=True)
class Slot:
    """One of the tensors that travel for each chunk."""

    shape: torch.Size
    dtype: torch.dtype
    codec: Codec
    wire_bytes: int
    raw: bool  # the tensor's own bytes travel, no codec
    change: Slot | None = None  # how it travels where its change does: delta(...)

    @staticmethod
    def of(like: Any, codec: Codec) -> Slot:
        """The slot of a tensor, or of anything else with a shape and a dtype."""
        if isinstance(codec, Delta):
            change = Slot.of(like, codec.change)
            return replace(Slot.of(like, codec.first), change=None if change.raw else change)
        shape, dtype = torch.Size(like.shape), like.dtype
        size, wire_bytes = shape.numel() * dtype.itemsize, codec.wire_bytes(shape, dtype)
        raw = codec.spec == "none" or dtype not in FLOATS or size < RAW_BELOW or wire_bytes >= size
        return Slot(shape, dtype, codec, size if raw else wire_bytes, raw)

    @property
    def tensor_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Link:
    """What both ends of one direction of one link have in common."""

    def __init__(
        self, codec: Codec, source: int, target: int, device: torch.device, group: Any, events: list[Event]
    ) -> None:
        self.codec = codec
        self.source, self.target = source, target  # stages
        self.direction = "forward" if target > source else "backward"
        self.device, self.group = device, group
        self.peer = -1  # the worker at the other end: its rank in the group; the schedule decides where stages live
        self.slots: list[Slot] = []
        self.copies: SampleCopies | None = None  # of the samples, for delta(...)
        self.step = 0
        self.events = events  # the stage's
        self.ledger = Ledger()
        self.clock = DeviceClock(device)
        self.staged = wire_device(group, device).type != device.type  # through pinned host buffers
        self.checksum_bytes = checksum_bytes(group, device)
        self.copier = torch.cuda.Stream(device) if self.staged else None
        self._threads: ThreadPoolExecutor | None = None

    def threads(self, count: int) -> ThreadPoolExecutor:
        """Threads that wait for copies and messages, made when first asked for."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(count, thread_name_prefix=f"thinpipe-{self.source}-{self.target}")
        return self._threads

    def begin_step(self) -> None:
        """A step is about to start: what the last one still held is free."""

    def __str__(self) -> str:
        return f"{self.direction} link from stage {self.source} to stage {self.target}"

    def counters(self) -> Counters:
        return self.ledger.counters

    def reset_counters(self) -> None:
        self.ledger.reset()
        self.clock.reset()

    def tag(self, chunk: int, slot: int) -> int:
        backward = int(self.direction == "backward")
        return 1 << 30 | ((backward * _STAGES + self.source) * _CHUNKS + chunk) * _SLOTS + slot

    def check_limits(self, chunks: int) -> None:
        """Everything that travels must have a tag of its own."""
        for what, count, limit in (
            ("stages", max(self.source, self.target) + 1, _STAGES),
            ("chunks", chunks, _CHUNKS),
            ("tensors between two stages", len(self.slots), _SLOTS),
        ):
            if count > limit:
                raise ValueError(f"a pipeline has at most {limit} {what}, got {count}")

    def begin_samples(self, samples: Tensor | None, chunks: int) -> None:
        """Which samples the step has that is about to start, for the copies of them; None: an evaluation."""
        if self.copies is None:
            return
        for index, slot in enumerate(self.slots):
            if slot.change is None:
                continue
            if samples is not None and slot.shape[0] * chunks != len(samples):
                raise ValueError(
                    f"{self.codec} keeps a copy of every sample: the {self} carries {chunks} chunks of {slot}, whose "
                    f"first dimension is to be that of the samples, but the step was said to have {len(samples)}"
                )
            self.copies.reserve(index, slot.shape[1:])
        self.copies.begin(samples, chunks)

    def message(self, chunk: int, index: int) -> Slot:
        """How a tensor of a chunk travels in this step: both ends find the same."""
        slot = self.slots[index]
        if slot.change is None or self.copies is None or not self.copies.knows(chunk):
            return slot
        return slot.change

    def _copies_of(self, index: int) -> SampleCopies | None:
        return None if self.slots[index].change is None else self.copies

    def open_message(self, chunk: int, index: int, wire: Tensor, out: Tensor) -> None:
        """Decode into ``out``. Copies change by what was decoded, so the sender opens its messages too."""
        slot, copies = self.message(chunk, index), self._copies_of(index)
        if copies is not None and copies.knows(chunk):
            change = slot.codec.decode(wire, torch.empty(slot.shape, dtype=torch.float32, device=self.device))
            out.copy_(copies.apply(chunk, index, change))
            return
        if slot.raw:
            as_bytes(out).copy_(wire)
        else:
            slot.codec.decode(wire, out)
        if copies is not None:
            copies.remember(chunk, index, out)

    def host_buffer(self, size: int) -> Tensor:
        device = "cpu" if self.staged else self.device
        return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=self.staged)

    def message_bytes(self, slot: Slot) -> int:
        """What travels: the wire, and the checksum behind it."""
        return slot.wire_bytes + self.checksum_bytes

    def await_work(self, work: dist.Work | None, me: int, chunk: int, verb: str) -> None:
        assert work is not None  # torch returns None to workers outside the group
        try:
            with waiting():
                work.wait()
        except RuntimeError as error:
            other = self.source if me == self.target else self.target
            raise LinkError(
                f"worker {self.peer} with stage {other} is gone: stage {me} could not {verb} chunk {chunk} over the "
                f"{self}. Look for the first error of worker {self.peer}, then restart all workers. ({error})"
            ) from error


Tap = Callable[[Link, int, int, Tensor], None]  # link, chunk, slot, what is to be sent

_Message = tuple[Slot, Tensor]  # and the wire with its checksum, or a tensor's own bytes
_Sends = list[dist.Work | None] | Future[list[dist.Work | None]]


class SendLink(Link):
    """The sending end: encodes each tensor into a buffer it keeps, and sends that."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state: dict[int, MutableMapping[str, Tensor]] = {}  # per slot, what the codec remembers
        self.seed = 0  # of stochastic rounding
        self.steps_before = 0  # steps of the run before the first one here: rounding goes on where it was
        self.tap: Tap | None = None  # is shown every tensor before it is encoded
        self._spare: dict[int, list[Tensor]] = {}  # wire buffers by size
        self._under_way: deque[tuple[int, list[_Message], _Sends]] = deque()  # chunk, what is sent, how
        self._handed_out: list[_Message] = []  # what a schedule sends

    def configure(self, slots: list[Slot], chunks: int) -> None:
        if slots != self.slots:
            self._spare.clear()
        self.slots = slots
        self.check_limits(chunks)

    def send(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        """(2) Encode and send. Waits for nothing, unless WINDOW chunks are under way already."""
        while len(self._under_way) >= WINDOW:
            self._await_oldest()
        messages = [self._encode(chunk, index, tensor) for index, tensor in enumerate(tensors)]
        if self.copier is None:
            works: _Sends = self._hand_over(chunk, self.step, messages)
        else:
            left = torch.cuda.Event()
            left.record(self.copier)
            works = self.threads(1).submit(self._hand_over, chunk, self.step, messages, left)
        self._under_way.append((chunk, messages, works))

    def send_ops(self, chunk: int, tensors: Sequence[Tensor]) -> list[dist.P2POp]:
        """The same as operations for a schedule that orders and awaits them."""
        messages = [self._encode(chunk, index, tensor) for index, tensor in enumerate(tensors)]
        if self.copier is not None:
            self.copier.synchronize()  # the schedule sends at once
        self._seal(chunk, self.step, messages)
        self._handed_out += messages
        return [
            dist.P2POp(dist.isend, message, group=self.group, tag=self.tag(chunk, index), group_peer=self.peer)
            for index, (_, message) in enumerate(messages)
        ]

    def finish(self) -> None:
        """(4) Wait until everything sent has left."""
        while self._under_way:
            self._await_oldest()

    def begin_step(self) -> None:
        """The schedule has awaited all that it was handed in the last step."""
        self._recycle(self._handed_out)
        self._handed_out = []

    def state_dict(self) -> dict[str, Tensor]:
        steps = self.steps_before + self.step
        kept = {f"{slot}.{name}": value for slot, state in self.state.items() for name, value in state.items()}
        return kept | ({"steps": torch.tensor(steps)} if steps else {})

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state = {}
        self.steps_before = int(state.get("steps", 0)) - self.step
        for key, value in state.items():
            slot, dot, name = key.partition(".")
            if dot:
                self.state.setdefault(int(slot), {})[name] = value.to(self.device)

    def counters(self) -> Counters:
        self.ledger.counters.encode_ms = self.clock.total_ms()
        return self.ledger.counters

    def _encode(self, chunk: int, index: int, tensor: Tensor) -> _Message:
        slot, copies = self.message(chunk, index), self._copies_of(index)
        if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
            raise ValueError(
                f"all chunks of all steps have one shape: the {self} was set up for {slot}, but tensor {index} of "
                f"chunk {chunk} is {Slot.of(tensor, self.codec)}. Pad or drop a batch that does not fill its chunks."
            )
        if self.tap is not None:
            self.tap(self, chunk, index, tensor)
        began = now()
        size = slot.wire_bytes
        if slot.raw and (self.staged or not self.checksum_bytes):
            message = wire = as_bytes(tensor.detach().contiguous())
        else:
            on_device = torch.empty(size, dtype=torch.uint8, device=self.device) if self.staged else None
            message = self._buffer(self.message_bytes(slot)) if on_device is None else on_device
            wire = message[:size]
        if slot.raw and message is not wire:
            wire.copy_(as_bytes(tensor.detach().contiguous()))
        elif not slot.raw:
            with self.clock.measure():
                sent = copies.change(chunk, index, tensor) if copies is not None and copies.knows(chunk) else tensor
                step = self.steps_before + self.step
                key = rounding_key(self.seed, self.source, self.target, index, step, chunk)
                slot.codec.encode(sent, wire, state=self.state.setdefault(index, {}), key=key)
        if copies is not None and copies.are_kept:
            with self.clock.measure():
                self.open_message(chunk, index, wire, torch.empty(slot.shape, dtype=slot.dtype, device=self.device))
        if self.copier is not None:
            self.copier.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.copier):
                wire.record_stream(self.copier)
                message = self._buffer(self.message_bytes(slot))
                message[:size].copy_(wire, non_blocking=True)
        if not slot.raw:
            self.events.append(Event("encode", self.source, chunk, began, now()))
        self.ledger.counters.count(slot.tensor_bytes, self.message_bytes(slot))
        return slot, message

    def _hand_over(
        self, chunk: int, step: int, messages: Sequence[_Message], left: torch.cuda.Event | None = None
    ) -> list[dist.Work | None]:
        """Give wires to the network, once they have left the GPU."""
        if left is not None:
            left.synchronize()
        self._seal(chunk, step, messages)
        return [
            dist.isend(message, group=self.group, tag=self.tag(chunk, index), group_dst=self.peer)
            for index, (_, message) in enumerate(messages)
        ]

    def _seal(self, chunk: int, step: int, messages: Sequence[_Message]) -> None:
        """The last thing before they leave: checksums, and when it was."""
        for index, (_, message) in enumerate(messages):
            if self.checksum_bytes:
                seal(message, step, chunk, index)
        ended = now()
        for index, (_, message) in enumerate(messages):
            self.ledger.stamps.append(Stamp(step, chunk, index, ended, ended, wire_bytes=message.numel()))

    def _await_oldest(self) -> None:
        chunk, messages, works = self._under_way.popleft()
        began = now()
        for work in works.result() if isinstance(works, Future) else works:
            self.await_work(work, self.source, chunk, "send")
        self.ledger.counters.blocked_ms += (now() - began) * 1e3
        self._recycle(messages)

    def _buffer(self, size: int) -> Tensor:
        spares = self._spare.get(size)
        return spares.pop() if spares else self.host_buffer(size)

    def _recycle(self, messages: list[_Message]) -> None:
        for slot, message in messages:
            if self.checksum_bytes or not slot.raw:  # the others are the tensors themselves
                self._spare.setdefault(message.numel(), []).append(message)


class RecvLink(Link):
    """The receiving end: posts receives into buffers it keeps, decodes into tensors that it lends and takes back."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.chunks = 0
        self.trace = False  # stamp arrivals too: one thread per message
        self._wires: dict[tuple[int, int], Tensor] = {}
        self._works: dict[tuple[int, int], dist.Work | None] = {}
        self._arrivals: dict[tuple[int, int], Future[float]] = {}
        self._lent: dict[int, list[tuple[int, Tensor]]] = {}
        self._spare: dict[int, list[Tensor]] = {}
        self._on_device: dict[tuple[int, int], Tensor] = {}  # wires of a stage on a GPU, copied there
        self._copied: dict[tuple[int, int], torch.cuda.Event] = {}
        self._decoded: dict[tuple[int, int], torch.cuda.Event] = {}

    def configure(self, slots: list[Slot], chunks: int) -> None:
        if slots != self.slots:
            self._wires.clear()
            self._on_device.clear()
            self._spare.clear()
        self.slots, self.chunks = slots, chunks
        self.check_limits(chunks)

    def post(self) -> None:
        """(1) Post the receives of a whole step."""
        for copied in self._copied.values():
            copied.synchronize()  # the last step's wires are on the GPU; their host buffers may be overwritten
        for key in ((chunk, slot) for chunk in range(self.chunks) for slot in range(len(self.slots))):
            self._works[key] = dist.irecv(self._message(key), group=self.group, tag=self.tag(*key), group_src=self.peer)
        if (self.trace or self.staged) and self._works:
            threads = self.threads(len(self._works))
            self._arrivals = {key: threads.submit(self._arrival, key) for key in self._works}

    def recv_ops(self, chunk: int) -> list[dist.P2POp]:
        """The receives of one chunk, as operations for a schedule that orders and awaits them."""
        return [
            dist.P2POp(
                dist.irecv,
                self._message((chunk, slot)),
                group=self.group,
                tag=self.tag(chunk, slot),
                group_peer=self.peer,
            )
            for slot in range(len(self.slots))
        ]

    def receive(self, chunk: int) -> list[Tensor]:
        """(3) Wait for a chunk that was posted, or take one that the schedule has waited for; decode it."""
        tensors = []
        for index in range(len(self.slots)):
            slot, key, needed = self.message(chunk, index), (chunk, index), now()
            arrived = self._arrivals.pop(key).result() if key in self._arrivals else None
            if arrived is not None:
                del self._works[key]
            elif key in self._works:
                self.await_work(self._works.pop(key), self.target, chunk, "receive")
            usable, size = now(), self.message_bytes(slot)
            if arrived is None:  # no thread did this: the schedule waited for the message, or this one has
                self._check(key)
                if self.staged:
                    self._copy(key)
            tensors.append(self._decode(key, slot))
            self.ledger.counters.count(slot.tensor_bytes, size)
            self.ledger.counters.blocked_ms += (usable - needed) * 1e3
            self.ledger.stamps.append(Stamp(self.step, chunk, index, needed, usable, arrived, size))
            self.events.append(Event("wait", self.target, chunk, needed, usable))
            if not slot.raw:
                self.events.append(Event("decode", self.target, chunk, usable, now()))
        return tensors

    def begin_step(self) -> None:
        """Take back what a step without a backward, an evaluation, still has."""
        for chunk in list(self._lent):
            self.release(chunk)

    def release(self, chunk: int) -> None:
        """(5) Take back the tensors of a chunk whose backward is done."""
        for index, tensor in self._lent.pop(chunk, ()):
            self._spare.setdefault(index, []).append(tensor)

    def counters(self) -> Counters:
        self.ledger.counters.decode_ms = self.clock.total_ms()
        return self.ledger.counters

    def _decode(self, key: tuple[int, int], slot: Slot) -> Tensor:
        chunk, index = key
        wire = self._message(key)[: slot.wire_bytes]
        if slot.raw and not self.staged:
            received = wire.view(slot.dtype).view(slot.shape)
            copies = self._copies_of(index)
            if copies is not None:
                copies.remember(chunk, index, received)
            return received
        spares = self._spare.get(index)
        tensor = spares.pop() if spares else torch.empty(slot.shape, dtype=slot.dtype, device=self.device)
        self._lent.setdefault(chunk, []).append((index, tensor))
        if self.staged:
            torch.cuda.current_stream(self.device).wait_event(self._copied[key])
            wire = self._on_device[key][: slot.wire_bytes]
        with self.clock.measure() if not slot.raw else nullcontext():
            self.open_message(chunk, index, wire, tensor)
        if self.staged:
            self._decoded[key] = torch.cuda.Event()
            self._decoded[key].record()
        return tensor.detach()  # a new leaf every time: gradients of the last user are not this one's

    def _message(self, key: tuple[int, int]) -> Tensor:
        """Where a message arrives."""
        if key not in self._wires:
            slot = self.slots[key[1]]
            self._wires[key] = self.host_buffer(max(map(self.message_bytes, (slot, slot.change or slot))))
        return self._wires[key][: self.message_bytes(self.message(*key))]

    def _check(self, key: tuple[int, int]) -> None:
        if self.checksum_bytes and not is_intact(self._message(key), self.step, *key):
            raise ChecksumError(
                f"chunk {key[0]} of step {self.step} over the {self}, from worker {self.peer}, was changed on its way: "
                "its checksum does not match. Look for errors of the network or of memory, then go on from the last "
                "checkpoint"
            )

    def _arrival(self, key: tuple[int, int]) -> float:
        self.await_work(self._works[key], self.target, key[0], "receive")
        arrived = now()
        self._check(key)
        if self.staged:
            self._copy(key)
        return arrived

    def _copy(self, key: tuple[int, int]) -> None:
        """Move a wire onto the GPU, on the stream for that, once what lay there has been decoded."""
        assert self.copier is not None
        with torch.cuda.stream(self.copier):
            if key in self._decoded:
                self.copier.wait_event(self._decoded[key])
            wire = self._message(key)
            if key not in self._on_device:
                self._on_device[key] = torch.empty_like(self._wires[key], device=self.device, pin_memory=False)
            self._on_device[key][: len(wire)].copy_(wire, non_blocking=True)
            self._copied[key] = torch.cuda.Event()
            self._copied[key].record()
