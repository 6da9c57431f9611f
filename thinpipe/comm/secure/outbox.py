"""The sending half of a session: messages are cut into frames, which are kept until they are acknowledged.

waiting             ->   staged              ->   in flight            ->   forgotten
sends, not yet           copied into frames       numbered, sent            acknowledged by the peer
or partly copied         of DATA
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque

from thinpipe.comm.secure import frames
from thinpipe.comm.secure.frames import HEADER_BYTES, PAYLOAD_BYTES, FrameError, new_frame
from thinpipe.comm.secure.operation import FRAME_COST, Key, Operation

_MOST_WANTS = 1 << 16
_POOL_FRAMES = 32  # memory of long frames that is used again: new memory costs more than the copy into it


class Outbox:
    """Sends of one end of a pair, and the frames with a number."""

    def __init__(self, buffer_bytes: int) -> None:
        self.credit = 0  # the charges that the peer allows in all
        self._buffer_bytes, self._buffered = buffer_bytes, 0  # of DATA staged and in flight
        self._sends: defaultdict[Key, int] = defaultdict(int)
        self._waiting: OrderedDict[tuple[Key, int], Operation] = OrderedDict()
        self._wanted: deque[Operation] = deque()  # those of them that the peer wants
        self._early_wants: set[tuple[Key, int]] = set()  # of messages that are still to be sent
        self._charged = 0
        self._urgent: deque[memoryview] = deque()  # WANT and CONTROL, sent ahead of messages
        self._staged: deque[memoryview] = deque()
        self._in_flight: deque[memoryview] = deque()
        self._repeated: deque[memoryview] = deque()  # those of them to send again
        self._last = self._acknowledged = 0  # number given, and acknowledged by the peer
        self._pool: list[memoryview] = []
        self._leaving = self._bye = False

    def send(self, key: Key, view: memoryview, error: str | None) -> Operation:
        operation = Operation(key, self._sends[key], view)
        if error or self._leaving:
            operation.finish(error or "this worker has ended its part of the run")
            return operation
        self._sends[key] += 1
        self._waiting[key, operation.ordinal] = operation
        if (key, operation.ordinal) in self._early_wants:
            self._early_wants.remove((key, operation.ordinal))
            self._want(operation)
        if len(view) <= PAYLOAD_BYTES and next(iter(self._waiting.values())) is operation:
            self.stage()
        return operation

    def send_urgent(self, frame: memoryview) -> None:
        if not self._bye:
            self._urgent.append(frame)

    def leave(self) -> None:
        """Send BYE after all messages."""
        self._leaving = True
        self.stage(0)

    def fail(self, error: str) -> None:
        for operation in self._waiting.values():
            operation.finish(error)
        for queue in (self._waiting, self._wanted, self._staged, self._urgent, self._repeated):
            queue.clear()

    @property
    def is_waiting(self) -> bool:
        """Return True if a send is not complete."""
        return bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Return True if the peer has acknowledged everything."""
        return not (self._waiting or self._urgent or self._staged or self._in_flight)

    @property
    def is_urgent(self) -> bool:
        return bool(self._urgent)

    @property
    def has_frames(self) -> bool:
        """Return True if ``next`` may return a frame."""
        return bool(self._urgent or self._repeated or self._staged or self._waiting)

    def unfinished(self) -> int | None:
        """Return the number of frames that are not acknowledged once BYE is one of them; None before."""
        return len(self._in_flight) + len(self._staged) if self._bye else None

    def stage(self, most: int = 1) -> int:
        """Copy up to ``most`` frames of waiting sends into the buffer; return their number."""
        count = 0
        while self._waiting and count < most and self._buffered < self._buffer_bytes:
            message = self._wanted[0] if self._wanted else next(iter(self._waiting.values()))
            size = min(len(message.view) - message.at, PAYLOAD_BYTES)
            if not message.wanted:
                if self._charged + size + FRAME_COST > self.credit:
                    break
                self._charged += size + FRAME_COST
            self._staged.append(self._data_frame(message, size))
            count += 1
            message.at += size
            if message.at == len(message.view):
                del self._waiting[message.key, message.ordinal]
                if message.wanted:
                    self._wanted.popleft()
                message.finish()
        if self._leaving and not self._bye and not self._waiting:
            self._bye = True
            self._staged.append(new_frame(frames.BYE))
        return count

    def _data_frame(self, message: Operation, size: int) -> memoryview:
        (stream, tag), flags = message.key, 0 if message.wanted else frames.CHARGED
        is_pooled = size == PAYLOAD_BYTES and self._pool
        frame = self._pool.pop() if is_pooled else memoryview(bytearray(HEADER_BYTES + size))
        frames.describe_frame(
            frame, frames.DATA, stream=stream, tag=tag, flags=flags, offset=message.at, total=len(message.view)
        )
        frame[HEADER_BYTES:] = message.view[message.at : message.at + size]
        self._buffered += len(frame) + FRAME_COST
        return frame

    def next(self) -> memoryview | None:
        """Return the next frame to send: one that is repeated, or a new one with the next number."""
        if self._repeated:
            return self._repeated.popleft()
        if not self._urgent and not self._staged:
            self.stage()
        queue = self._urgent or self._staged
        if not queue:
            return None
        frame = queue.popleft()
        self._last += 1
        frames.number_frame(frame, self._last)
        self._in_flight.append(frame)
        return frame

    def resume(self, acknowledged: int) -> None:
        """Send again what the peer has not received."""
        self.confirm(acknowledged)
        self._repeated = deque(self._in_flight)

    def confirm(self, acknowledged: int) -> None:
        """Forget the frames that the peer has acknowledged."""
        self.check(acknowledged)
        for _ in range(acknowledged - self._acknowledged):
            frame = self._in_flight.popleft()
            if frame[0] == frames.DATA:
                self._buffered -= len(frame) + FRAME_COST
                if len(frame) == frames.FRAME_BYTES and len(self._pool) < _POOL_FRAMES:
                    self._pool.append(frame)
        self._acknowledged = acknowledged

    def check(self, acknowledged: int) -> None:
        if not self._acknowledged <= acknowledged <= self._last:
            raise FrameError(f"frame {acknowledged} is acknowledged, the last one sent is {self._last}")

    def want(self, key: Key, ordinal: int) -> None:
        """Send a message first, and uncharged; ``ordinal``: among the messages of the key."""
        operation = self._waiting.get((key, ordinal))
        if operation is not None and not operation.wanted:
            self._want(operation)
        elif ordinal >= self._sends.get(key, 0):
            if len(self._early_wants) >= _MOST_WANTS:
                raise FrameError(f"more than {_MOST_WANTS} messages are asked for that were not sent")
            self._early_wants.add((key, ordinal))

    def _want(self, operation: Operation) -> None:
        operation.wanted = True
        self._wanted.append(operation)
