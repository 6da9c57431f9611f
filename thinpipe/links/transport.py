"""Transports: move the messages of a link from one end to the other.

``Direct`` sends and receives on its own, each message with its tag: for backends that have tags (gloo). ``Staged`` does
the same for a GPU whose wires are sent through host memory; threads wait for the copies, so the worker does not block.
``Scheduled`` starts nothing: it returns operations to torch's schedule, which starts and awaits them in its own order,
for backends without tags (NCCL). ``LocalTransport`` connects two ends in one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch.distributed as dist

from thinpipe.comm.backend import wire_device
from thinpipe.comm.control import waiting
from thinpipe.comm.errors import ChecksumError, LinkError
from thinpipe.links.counters import Ledger, Stamp, now
from thinpipe.links.memory import InPlace, Pinned
from thinpipe.links.message import Message, find_end, is_intact, pack, seal, unpack
from thinpipe.links.slot import Route


class Transport(ABC):
    """Base class of the transports: sends or receives the messages of one link end."""

    ahead: ClassVar[bool] = True  # whether receives can be posted before the sends

    def __init__(self, route: Route, memory: InPlace, ledger: Ledger) -> None:
        self.route, self.memory, self.ledger = route, memory, ledger

    def begin_step(self) -> None:  # noqa: B027
        """Begin a step."""

    @abstractmethod
    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        """Send the loaded messages of a chunk, or return the send operations for a schedule."""

    def await_sends(self, but: int = 0) -> None:  # noqa: B027
        """Wait until the sends of all but the last ``but`` chunks have completed."""

    def post(self, messages: Iterable[Message], traced: int) -> None:  # noqa: B027
        """Post the receives of a step, before any of them is needed; record when the first ``traced`` chunks arrive."""

    def recv_ops(self, messages: Iterable[Message]) -> list[dist.P2POp]:
        """Return the receive operations of a chunk for a schedule."""
        return []

    def receive(self, message: Message) -> None:
        """Wait for a posted message, or take one that the schedule has awaited; verify and unload it."""
        message.needed, message.arrived = now(), None
        if message.pending is not None:
            message.arrived = message.pending.result()
            message.pending = message.work = None
        elif message.work is not None:
            self.await_work(message)
        message.usable = now()
        if message.arrived is None:  # no thread has called accept
            self.accept(message)

    def accept(self, message: Message) -> None:
        """Verify the checksum of a received message, unpack its integers and unload it."""
        numbers = message.step, message.chunk, message.slot
        has_end = message.integers is None or find_end(message)
        if self.memory.checksum_bytes and not (has_end and is_intact(message.buffer, *numbers)):
            raise ChecksumError(
                f"chunk {message.chunk} of step {message.step} over the {self.route}, from worker {self.route.peer}, "
                "was changed on its way: its checksum does not match. Look for errors of the network or of memory, "
                "then go on from the last checkpoint"
            )
        if message.integers is not None:
            began = now()
            unpack(message)
            message.packing_ms = (now() - began) * 1e3
        self.memory.unload(message)

    def seal(self, messages: Sequence[Message]) -> None:
        """Pack integers, add checksums and record time stamps: the last step before messages are sent."""
        for message in messages:
            if message.integers is not None:
                began = now()
                pack(message)
                self.ledger.packing_ms += (now() - began) * 1e3
            if self.memory.checksum_bytes:
                seal(message.buffer, message.step, message.chunk, message.slot)
        ended = now()
        for message in messages:
            size = len(message.buffer)
            self.ledger.counters.count(message.tensor_bytes, size)
            self.ledger.stamps.append(Stamp(message.step, message.chunk, message.slot, ended, ended, wire_bytes=size))

    def await_work(self, message: Message) -> None:
        assert message.work is not None
        route = self.route
        try:
            with waiting():
                message.work.wait()
        except RuntimeError as error:
            raise LinkError(
                f"worker {route.peer} with stage {route.other_stage} is gone: stage {route.stage} could not "
                f"{'send' if route.sends else 'receive'} chunk {message.chunk} over the {route}. Look for the first "
                f"error of worker {route.peer}, then restart all workers. ({error})"
            ) from error
        message.work = None

    def start(self, message: Message) -> None:
        """Start the isend or irecv of a message."""
        route, tag = self.route, self.route.tag(message.chunk, message.slot)
        if route.sends:
            message.work = dist.isend(message.buffer, group=route.group, tag=tag, group_dst=route.peer)
        else:
            message.work = dist.irecv(message.buffer, group=route.group, tag=tag, group_src=route.peer)
        assert message.work is not None  # torch returns None to workers outside the group

    def operation(self, message: Message) -> dist.P2POp:
        """Return the isend or irecv of a message as an operation for a schedule."""
        route, tag = self.route, self.route.tag(message.chunk, message.slot)
        call: Callable[..., Any] = dist.isend if route.sends else dist.irecv
        return dist.P2POp(call, message.buffer, group=route.group, tag=tag, group_peer=route.peer)


class Direct(Transport):
    """A transport that sends immediately and posts all receives at the start of a step."""

    def __init__(self, route: Route, memory: InPlace, ledger: Ledger) -> None:
        super().__init__(route, memory, ledger)
        self._in_flight: deque[list[Message]] = deque()  # by chunk
        self._threads: ThreadPoolExecutor | None = None

    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        self.start_sends(messages)
        self._in_flight.append(messages)
        return []

    def start_sends(self, messages: list[Message]) -> None:
        self.seal(messages)
        for message in messages:
            self.start(message)

    def await_sends(self, but: int = 0) -> None:
        while len(self._in_flight) > but:
            messages = self._in_flight.popleft()
            began = now()
            for message in messages:
                if message.pending is not None:
                    message.pending.result()
                self.await_work(message)
            self.ledger.counters.blocked_ms += (now() - began) * 1e3
            for message in messages:
                self.memory.recycle(message)

    def post(self, messages: Iterable[Message], traced: int) -> None:
        expected = list(messages)
        for message in expected:
            if message.work is None:  # it was not posted before the step
                self.memory.reuse(message)
                self.start(message)
        for message in (each for each in expected if each.chunk < traced):
            message.pending = self.threads(len(expected)).submit(self._arrival, message)

    def threads(self, count: int) -> ThreadPoolExecutor:
        """Return the thread pool; create it on first use."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(count, f"thinpipe-{self.route.source}-{self.route.target}")
        return self._threads

    def _arrival(self, message: Message) -> float:
        self.await_work(message)
        arrived = now()
        self.accept(message)
        return arrived


class Staged(Direct):
    """A transport whose threads send wires once they are copied from the GPU, and copy received wires to the GPU."""

    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        started = self.threads(1).submit(self._send_loaded, messages, self.memory.loaded())
        for message in messages:
            message.pending = started
        self._in_flight.append(messages)
        return []

    def post(self, messages: Iterable[Message], traced: int) -> None:
        super().post(messages, traced=1 << 30)

    def _send_loaded(self, messages: list[Message], loaded: Callable[[], None]) -> None:
        loaded()
        self.start_sends(messages)


class Scheduled(Transport):
    """A transport whose operations are started and awaited by a schedule."""

    ahead = False
    _handed_out: Sequence[Message] = ()

    def begin_step(self) -> None:
        """Recycle the messages of the last step, all of which the schedule has awaited."""
        for message in self._handed_out:
            self.memory.recycle(message)
        self._handed_out = ()

    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        self.memory.loaded()()  # the schedule sends immediately
        self.seal(messages)
        self._handed_out = [*self._handed_out, *messages]
        return [self.operation(message) for message in messages]

    def recv_ops(self, messages: Iterable[Message]) -> list[dist.P2POp]:
        expected = list(messages)
        for message in expected:
            self.memory.reuse(message)
        return [self.operation(message) for message in expected]


class LocalTransport(Transport):
    """The transport between two ends in one process: the wire that is sent is the wire that is received."""

    ahead = False

    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        assert self.route.handover is not None
        self.seal(messages)
        for message in messages:
            self.route.handover[self.route.tag(message.chunk, message.slot)] = message.buffer
        return []

    def post(self, messages: Iterable[Message], traced: int) -> None:
        list(messages)  # iterating registers each in its link; the sender's memory is used

    def receive(self, message: Message) -> None:
        assert self.route.handover is not None
        message.needed = message.usable = now()
        message.storage = message.buffer = self.route.handover.pop(self.route.tag(message.chunk, message.slot))


def transport(route: Route, ledger: Ledger, *, scheduled: bool) -> Transport:
    """Return the transport for a route."""
    if route.handover is not None:
        return LocalTransport(route, InPlace(route), ledger)
    staged = wire_device(route.group, route.device).type != route.device.type
    memory = Pinned(route) if staged else InPlace(route)
    if scheduled:
        return Scheduled(route, memory, ledger)
    return Staged(route, memory, ledger) if staged else Direct(route, memory, ledger)
