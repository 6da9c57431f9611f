"""The receiving half of a session: arriving messages meet their receives, the others are held within the window."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from thinpipe.comm.secure import frames
from thinpipe.comm.secure.frames import Frame, FrameError, new_frame
from thinpipe.comm.secure.operation import FRAME_COST, Key, Operation


class _Message:
    """A message whose first frame has begun to arrive."""

    __slots__ = ("at", "charge", "chunks", "receive", "total")

    def __init__(self, total: int, receive: Operation | None) -> None:
        self.total, self.receive, self.at = total, receive, 0
        self.chunks: list[memoryview] = []  # while no receive is posted
        self.charge = 0  # of the chunks


class Inbox:
    """Receives of one end of a pair. ``announce`` sends WANT."""

    def __init__(self, window: int, announce: Callable[[memoryview], None]) -> None:
        self.released = 0  # charges of bytes that are in the memory of receives
        self._window, self._held = window, 0  # charges of chunks
        self._announce = announce
        self._receives: defaultdict[Key, int] = defaultdict(int)
        self._posted: dict[Key, deque[Operation]] = {}
        self._arriving: dict[Key, _Message] = {}  # incomplete
        self._unexpected: dict[Key, deque[_Message]] = {}  # without a receive
        self._unannounced: dict[Operation, None] = {}  # incomplete receives without a WANT, in order
        self._in_place = False  # the present payload is read into the memory of its receive

    def receive(self, key: Key, view: memoryview, error: str | None) -> Operation:
        operation = Operation(key, self._receives[key], view)
        unexpected = self._unexpected.get(key)
        message = unexpected[0] if unexpected else None
        complete = message is not None and self._arriving.get(key) is not message
        if error and not complete:
            operation.finish(error)
            return operation
        self._receives[key] += 1
        if message is None:
            self._posted.setdefault(key, deque()).append(operation)
        else:
            _check_length(message.total, operation)
            _pop(self._unexpected, key)
            for chunk in message.chunks:
                view[operation.at : operation.at + len(chunk)] = chunk
                operation.at += len(chunk)
            self._held -= message.charge
            self.released += message.charge
            message.chunks, message.receive = [], operation
        if complete:
            operation.finish()
        else:
            self._unannounced[operation] = None
            self._announce_receives()
        return operation

    def fail(self, error: str) -> None:
        for queue in self._posted.values():
            for operation in queue:
                operation.finish(error)
        for message in self._arriving.values():
            if message.receive is not None:
                message.receive.finish(error)
        self._posted.clear()
        self._unannounced.clear()

    def place(self, frame: Frame) -> memoryview:
        """Return the memory for the payload of a frame of DATA; raise FrameError if it may not arrive."""
        key = frame.stream, frame.tag
        message = self._arriving.get(key)
        if message is None:
            message = _Message(frame.total, self._posted[key][0] if key in self._posted else None)
            if message.receive is not None:
                _check_length(frame.total, message.receive)
        if frame.offset != message.at or frame.total != message.total:
            raise FrameError(
                f"bytes from {frame.offset} of {frame.total} arrive where {message.at} of {message.total} are next"
            )
        receive = message.receive
        if frame.flags & frames.CHARGED:
            if self._held + frame.size + FRAME_COST > self._window:
                raise FrameError(f"more than {self._window} bytes arrive for receives that are not posted")
        elif receive is None or not receive.wanted:
            raise FrameError("a message arrives uncharged that was not asked for")
        if key not in self._arriving:
            self._arriving[key] = message
            if receive is None:
                self._unexpected.setdefault(key, deque()).append(message)
            else:
                _pop(self._posted, key)
        self._in_place = receive is not None
        if receive is None:
            return memoryview(bytearray(frame.size))
        return receive.view[frame.offset : frame.offset + frame.size]

    def take(self, frame: Frame, payload: memoryview) -> None:
        """Take the payload that has been read into the memory of ``place``."""
        key = frame.stream, frame.tag
        message = self._arriving[key]
        message.at += frame.size
        charge = frame.size + FRAME_COST if frame.flags & frames.CHARGED else 0
        receive = message.receive
        if receive is None:
            message.chunks.append(payload)
            message.charge += charge
            self._held += charge
            self._announce_receives()
        else:
            if not self._in_place:  # it was posted while these bytes arrived
                receive.view[receive.at : message.at] = payload
            receive.at = message.at
            self.released += charge
        if message.at == message.total:
            del self._arriving[key]
            if receive is not None:
                self._unannounced.pop(receive, None)
                receive.finish()

    def _announce_receives(self) -> None:
        """Announce all incomplete receives if more than half of the window is held."""
        if 2 * self._held <= self._window:
            return
        for operation in self._unannounced:
            operation.wanted = True
            stream, tag = operation.key
            self._announce(new_frame(frames.WANT, stream=stream, tag=tag, offset=operation.ordinal))
        self._unannounced.clear()


def _check_length(total: int, receive: Operation) -> None:
    if total > len(receive.view):
        raise FrameError(f"a message of {total} bytes arrives for a receive of {len(receive.view)}")


def _pop(queues: dict[Key, deque[Any]], key: Key) -> None:
    """Remove the first entry of the queue of a key, and empty queues."""
    queues[key].popleft()
    if not queues[key]:
        del queues[key]
