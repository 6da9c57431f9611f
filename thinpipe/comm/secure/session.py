"""The session of a pair: messages between two workers, exactly once and in order, over connections that break.

Sans-I/O: channel.py writes what ``output`` returns and reads into ``buffer``; this module knows no socket and no clock.

(1) Messages are pushed: a send is cut into frames, complete when all its bytes are copied into frames. Those that the
    peer has not acknowledged yet are kept, BUFFER bytes at most; while these are full, sends wait: back-pressure.
(2) Frames are numbered. On a new connection each end sends its last received number (HELLO), and the other repeats
    what follows it. A number received twice is dropped, a gap is an error. A random id of the session tells a peer
    that was started again, and has lost its state, from one that was only cut off.
(3) Messages of one stream and tag arrive in the order of their sends and match receives in the order of their posting.
    Bytes of a message whose receive is posted are read into its memory, those of others into chunks of their own.
(4) Credit bounds these chunks: a frame is charged, and its charge is released when its bytes are in the memory of a
    receive. The receiver grants WINDOW bytes more than it has released; a peer that sends more is an error.
(5) While more than half of the window is held by chunks, every posted receive that is not complete is announced to the
    peer (WANT), which sends the messages of these receives first and uncharged.

Why no receive waits forever while its message was sent and connections come back:

- A frame in the buffer is delivered: it was charged to credit, or its receive is posted, so the receiver has memory
  for it whatever its program does. Then it is acknowledged. So the buffer never stays full: a send waits for credit.
- Let a receive wait whose message waits for credit. If the receiver's chunks hold more than half of the window, (5) has
  announced the receive: its message needs no credit. Otherwise the sender has credit for a quarter of the window, since
  a released quarter is granted at once, and sends the first message that waits for it, this one or one before it.
  Those before it are finitely many, and each of their frames leads to one of the two cases again.
"""

from __future__ import annotations

import secrets
from typing import Any

from thinpipe.comm.secure import frames
from thinpipe.comm.secure.frames import HEADER_BYTES, PAYLOAD_BYTES, Frame, FrameError, Parser, new_frame
from thinpipe.comm.secure.inbox import Inbox
from thinpipe.comm.secure.operation import Operation
from thinpipe.comm.secure.outbox import Outbox
from thinpipe.system.sanitize import one_line

BUFFER = WINDOW = 64 << 20
ACK_BYTES = 1 << 20  # received bytes after which an acknowledgement does not wait for a frame to travel with
_BATCH_BYTES = 1 << 18  # of frames returned at once
_PROTOCOL = 1
_LONGEST_ERROR = 500  # characters, of six bytes at most


class Session:
    """One end of a pair. Not thread-safe. ``peer``: its name in errors."""

    def __init__(self, peer: str, *, buffer_bytes: int = BUFFER, window: int = WINDOW) -> None:
        self.peer = peer
        self.error: str | None = None  # why the pair has ended
        self.left = False  # the peer has ended its part, in order
        self.resumed = False  # both ends of the present connection know what the other has received
        self.echo = 0  # the number of the last PONG
        self.control = bytearray()  # received bytes of the control channel, for the channel to take
        self._own_id, self._peer_id = secrets.token_hex(16), ""
        self._window, self._leaving = window, False
        self._outbox = Outbox(buffer_bytes)
        self._inbox = Inbox(window, self._outbox.send_urgent)
        self._parser = Parser(self._destination)
        self._received = 0  # the last number
        self._sink = memoryview(bytearray(PAYLOAD_BYTES))  # of frames received twice
        self._hello_due = self._ack_due = self._report_due = False
        self._ping: int | None = None
        self._pong: int | None = None
        self._ack_bytes = self._granted = 0  # received since the last acknowledgement; released at that time

    # Operations

    def send(self, stream: int, tag: int, view: memoryview) -> Operation:
        """Start sending a message; its memory may be changed once the operation is done."""
        return self._outbox.send((stream, tag), view, self.error)

    def receive(self, stream: int, tag: int, view: memoryview) -> Operation:
        """Post a receive of a message of at most the length of ``view``; its length is ``at`` once it is done."""
        operation = self._inbox.receive((stream, tag), view, self.error)
        self._grant()
        return operation

    def send_control(self, data: bytes) -> None:
        """Send bytes of the control channel, ahead of messages."""
        frame = new_frame(frames.CONTROL, len(data))
        frame[HEADER_BYTES:] = data
        if self.error is None:
            self._outbox.send_urgent(frame)

    def stage(self, most: int) -> int:
        """Copy up to ``most`` frames of sends into the buffer, ahead of ``output``; return their number."""
        return self._outbox.stage(most)

    def leave(self) -> None:
        """End this end after all sends."""
        self._leaving = True
        if self.error is None:
            self._outbox.leave()

    def fail(self, error: str, *, report: bool = False) -> None:
        """End the pair: all operations fail, now and later, but receives of messages that have arrived.

        ``report``: send the error to the peer, whose end fails, too.
        """
        if self.error is None:
            self.error, self._report_due = error, report
            self._outbox.fail(error)
            self._inbox.fail(error)

    @property
    def failed(self) -> bool:
        """Return True if the connection is of no use any more, because of an error."""
        return self.error is not None and not self.left

    @property
    def finished(self) -> bool:
        """Return True if this end has left, and the connection is needed no longer."""
        return self._leaving and (self.left or self._outbox.unfinished() == 0)

    @property
    def says_goodbye(self) -> bool:
        """Return True if the peer has acknowledged all but BYE."""
        return self._outbox.unfinished() in (0, 1)

    @property
    def is_waiting(self) -> bool:
        """Return True if a send is not complete."""
        return self._outbox.is_waiting

    @property
    def is_idle(self) -> bool:
        """Return True if the peer has acknowledged everything."""
        return self._outbox.is_idle

    @property
    def is_urgent(self) -> bool:
        """Return True if something is to be sent ahead of messages."""
        return self._outbox.is_urgent or self._ack_due

    @property
    def has_output(self) -> bool:
        """Return True if ``output`` may return frames."""
        return self._outbox.has_frames or self._ack_due

    # Output

    def connect(self) -> None:
        """Begin with a new connection, on which nothing was sent or received."""
        self._parser = Parser(self._destination)
        self.resumed, self._hello_due, self._ack_due = False, True, False
        self._ping = self._pong = None

    def ping(self, number: int) -> None:
        """Send a number that the peer returns: ``echo``."""
        self._ping = number

    @property
    def owes_ack(self) -> bool:
        """Return True if received frames are not acknowledged; the channel calls ``acknowledge`` after a short time."""
        return self._ack_bytes > 0

    def acknowledge(self) -> None:
        self._ack_due |= self._ack_bytes > 0

    def output(self) -> list[memoryview]:
        """Return the next frames to write, in order; none if there is nothing to send now."""
        if self._hello_due:
            self._hello_due = False
            content = {"protocol": _PROTOCOL, "session": self._own_id, "peer": self._peer_id}
            return [self._stamped(frames.json_frame(frames.HELLO, content))]
        if self._report_due:
            self._report_due = False
            return [self._stamped(frames.json_frame(frames.FAIL, {"error": str(self.error)[:_LONGEST_ERROR]}))]
        if not self.resumed:
            return []
        found = []
        for kind, number in ((frames.PING, self._ping), (frames.PONG, self._pong)):
            if number is not None:
                found.append(self._stamped(new_frame(kind, offset=number)))
        self._ping = self._pong = None
        size = 0
        while size < _BATCH_BYTES and (frame := self._outbox.next()) is not None:
            found.append(self._stamped(frame))
            size += len(frame)
        if self._ack_due:
            found.append(self._stamped(new_frame(frames.ACK)))
        return found

    def _stamped(self, frame: memoryview) -> memoryview:
        frames.stamp_frame(frame, self._received, self._inbox.released + self._window)
        self._ack_due, self._ack_bytes, self._granted = False, 0, self._inbox.released
        return frame

    # Input

    def buffer(self) -> memoryview:
        """Return the memory to read into next."""
        return self._parser.buffer()

    def received(self, count: int) -> None:
        """Process ``count`` bytes that were read into ``buffer()``; raise FrameError if the protocol forbids them."""
        if self.failed:  # in another thread
            return
        for frame, payload in self._parser.received(count):
            self._process(frame, payload)
            if self.failed:
                return

    def _destination(self, frame: Frame) -> memoryview:
        """Check a header against the state of the session; return the memory for its payload."""
        if self.resumed == (frame.kind == frames.HELLO):
            raise FrameError("a connection begins with one HELLO")
        if frame.kind != frames.HELLO:
            self._outbox.check(frame.acknowledged)
        if frame.sequence:
            if frame.sequence <= self._received:
                return self._sink[: frame.size]
            if frame.sequence != self._received + 1 or self.left:
                raise FrameError(f"frame {frame.sequence} follows after {self._received}{' and BYE' * self.left}")
        return self._inbox.place(frame) if frame.kind == frames.DATA else memoryview(bytearray(frame.size))

    def _process(self, frame: Frame, payload: memoryview) -> None:
        if frame.kind == frames.HELLO:
            self._resume(frames.parse_json(payload), frame.acknowledged)
        self._outbox.confirm(frame.acknowledged)
        self._outbox.credit = max(self._outbox.credit, frame.credit)
        if frame.kind == frames.PING:
            self._pong = frame.offset
        elif frame.kind == frames.PONG:
            self.echo = frame.offset
        elif frame.kind == frames.FAIL:
            error = one_line(str(frames.parse_json(payload).get("error"))[:_LONGEST_ERROR])
            self.fail(f"{self.peer} has ended the connection: {error}")
        if frame.sequence > self._received:
            self._received = frame.sequence
            self._ack_bytes += HEADER_BYTES + frame.size
            self._process_numbered(frame, payload)
        elif frame.sequence:
            self._ack_due = True  # its acknowledgement was lost

    def _process_numbered(self, frame: Frame, payload: memoryview) -> None:
        if frame.kind == frames.DATA:
            self._inbox.take(frame, payload)
        elif frame.kind == frames.WANT:
            self._outbox.want((frame.stream, frame.tag), frame.offset)
        elif frame.kind == frames.CONTROL:
            self.control += payload
        elif frame.kind == frames.BYE:
            self.left = self._ack_due = True
            self.fail(f"{self.peer} has ended its part of the run")
        self._grant()

    def _grant(self) -> None:
        """Acknowledge at once if the peer's buffer or credit may need it."""
        if self._ack_bytes >= ACK_BYTES or self._inbox.released - self._granted >= self._window // 4:
            self._ack_due = True

    def _resume(self, hello: dict[str, Any], acknowledged: int) -> None:
        """Process the peer's introduction, and send again what it has not received, (2)."""
        if hello.get("protocol") != _PROTOCOL:
            raise FrameError(f"it has version {hello.get('protocol')!r} of the protocol, this worker {_PROTOCOL}")
        session = hello.get("session")
        if not isinstance(session, str) or len(session) != 32:
            raise FrameError("it sends no id of its session")
        if self._peer_id not in ("", session) or hello.get("peer") not in ("", self._own_id):
            raise FrameError("one of both was started again meanwhile, and has lost its part of the run")
        self._outbox.resume(acknowledged)
        self._peer_id, self.resumed = session, True
