"""How messages get from one end of a link to the other.

``Direct`` sends and receives on its own, each message with its tag: for backends that have tags (gloo). ``Staged`` does
the same for a GPU whose wires travel through host memory; threads wait for the copies, so that the worker need not.
``Scheduled`` starts nothing: it makes operations for torch's schedule, which starts and awaits them in its own order,
for backends without tags (NCCL). Another way is another class (``Within`` of link.py).
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
    """One end of a link, as messages see it; and what all ways have in common."""

    ahead: ClassVar[bool] = True  # whether receives can be posted before anything is sent

    def __init__(self, route: Route, memory: InPlace, ledger: Ledger) -> None:
        self.route, self.memory, self.ledger = route, memory, ledger

    @abstractmethod
    def begin_step(self) -> None:
        """A step is about to start."""

    @abstractmethod
    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        """Send the loaded messages of a chunk, or return the operations that do, for a schedule."""

    @abstractmethod
    def await_sends(self, but: int = 0) -> None:
        """Wait until all chunks have left but so many."""

    @abstractmethod
    def post(self, messages: Iterable[Message], trace: bool) -> None:
        """Expect the messages of a step, before any of them is needed; ``trace``: see when each arrives."""

    @abstractmethod
    def recv_ops(self, messages: Iterable[Message]) -> list[dist.P2POp]:
        """The operations that receive the messages of a chunk, for a schedule."""

    def receive(self, message: Message) -> None:
        """Wait for a message that was posted, or take one that the schedule has waited for; check it and unload it."""
        message.needed, message.arrived = now(), None
        if message.pending is not None:
            message.arrived = message.pending.result()
            message.pending = message.work = None
        elif message.work is not None:
            self.await_work(message)
        message.usable = now()
        if message.arrived is None:  # no thread did this
            self.accept(message)

    def accept(self, message: Message) -> None:
        """The first thing after a message has arrived."""
        numbers = message.step, message.chunk, message.slot
        whole = message.integers is None or find_end(message)
        if self.memory.checksum_bytes and not (whole and is_intact(message.buffer, *numbers)):
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
        """The last thing before messages leave: integers packed, checksums, and when it was."""
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
        """isend or irecv."""
        tag = self.route.tag(message.chunk, message.slot)
        if self.route.sends:
            message.work = dist.isend(message.buffer, group=self.route.group, tag=tag, group_dst=self.route.peer)
        else:
            message.work = dist.irecv(message.buffer, group=self.route.group, tag=tag, group_src=self.route.peer)
        assert message.work is not None  # torch returns None to workers outside the group

    def operation(self, message: Message) -> dist.P2POp:
        """The same for a schedule."""
        call: Callable[..., Any] = dist.isend if self.route.sends else dist.irecv
        tag = self.route.tag(message.chunk, message.slot)
        return dist.P2POp(call, message.buffer, group=self.route.group, tag=tag, group_peer=self.route.peer)


class Direct(Transport):
    """Sends at once, posts all receives of a step when it starts."""

    def __init__(self, route: Route, memory: InPlace, ledger: Ledger) -> None:
        super().__init__(route, memory, ledger)
        self._under_way: deque[list[Message]] = deque()  # by chunk
        self._threads: ThreadPoolExecutor | None = None

    def begin_step(self) -> None:
        """What the last one sent has been awaited."""

    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        self.seal(messages)
        for message in messages:
            self.start(message)
        self._under_way.append(messages)
        return []

    def await_sends(self, but: int = 0) -> None:
        while len(self._under_way) > but:
            messages = self._under_way.popleft()
            began = now()
            for message in messages:
                if message.pending is not None:
                    message.pending.result()
                self.await_work(message)
            self.ledger.counters.blocked_ms += (now() - began) * 1e3
            for message in messages:
                self.memory.recycle(message)

    def post(self, messages: Iterable[Message], trace: bool) -> None:
        expected = list(messages)
        for message in expected:
            if message.work is None:  # it was not posted before the step
                self.memory.reuse(message)
                self.start(message)
        if trace:
            self.watch(expected)

    def recv_ops(self, messages: Iterable[Message]) -> list[dist.P2POp]:
        return []

    def watch(self, messages: Sequence[Message]) -> None:
        """A thread for each message, which sees it arrive."""
        for message in messages:
            message.pending = self.threads(len(messages)).submit(self._arrival, message)

    def threads(self, count: int) -> ThreadPoolExecutor:
        """Made when first asked for."""
        if self._threads is None:
            name = f"thinpipe-{self.route.source}-{self.route.target}"
            self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        return self._threads

    def _arrival(self, message: Message) -> float:
        self.await_work(message)
        arrived = now()
        self.accept(message)
        return arrived


class Staged(Direct):
    """A thread hands wires to gloo when they have left the GPU, others move what arrives onto the GPU at once."""

    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        handed_over = self.threads(1).submit(self._hand_over, messages, self.memory.loaded())
        for message in messages:
            message.pending = handed_over
        self._under_way.append(messages)
        return []

    def post(self, messages: Iterable[Message], trace: bool) -> None:
        super().post(messages, trace=True)

    def _hand_over(self, messages: Sequence[Message], loaded: Callable[[], None]) -> None:
        loaded()
        self.seal(messages)
        for message in messages:
            self.start(message)


class Scheduled(Transport):
    """A schedule starts and awaits everything."""

    ahead = False

    def __init__(self, route: Route, memory: InPlace, ledger: Ledger) -> None:
        super().__init__(route, memory, ledger)
        self._handed_out: list[Message] = []

    def begin_step(self) -> None:
        """The schedule has awaited all that it was handed in the last one."""
        for message in self._handed_out:
            self.memory.recycle(message)
        self._handed_out = []

    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        self.memory.loaded()()  # the schedule sends at once
        self.seal(messages)
        self._handed_out += messages
        return [self.operation(message) for message in messages]

    def await_sends(self, but: int = 0) -> None:
        """The schedule does."""

    def post(self, messages: Iterable[Message], trace: bool) -> None:
        """The schedule asks for ``recv_ops`` of each chunk."""

    def recv_ops(self, messages: Iterable[Message]) -> list[dist.P2POp]:
        expected = list(messages)
        for message in expected:
            self.memory.reuse(message)
        return [self.operation(message) for message in expected]


def transport(route: Route, ledger: Ledger, *, scheduled: bool) -> Transport:
    """The way of messages between the ends of a link."""
    staged = wire_device(route.group, route.device).type != route.device.type
    memory = Pinned(route) if staged else InPlace(route)
    if scheduled:
        return Scheduled(route, memory, ledger)
    return Staged(route, memory, ledger) if staged else Direct(route, memory, ledger)
