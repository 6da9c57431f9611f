"""The channel of a pair: a thread that drives a session over a connection, and connects again if that breaks.

OpenSSL forbids that two threads use one SSL object at a time; Python 3.11 does not prevent it, and later versions do so
by a lock that a waiting reader holds. So sockets do not block here, and one lock guards session and connection. It is
held while a few records are encrypted or decrypted, never while anything waits: the thread waits in ``poll``, other
threads for their operations. A thread that sends a short message writes it itself if it can without waiting.

The dialling end of a pair connects again, with growing pauses; the other end waits for ``attach``. A connection on
which nothing arrives, not even the answer to a PING, is dead, even if the network reports no error (NAT, a new
address). The pair is lost after the patience without a connection on which both ends have resumed the session.
"""

from __future__ import annotations

import json
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from thinpipe.comm.errors import describe
from thinpipe.comm.secure.frames import FrameError, join_small
from thinpipe.comm.secure.handshake import adapt_to_loss
from thinpipe.comm.secure.operation import Operation
from thinpipe.comm.secure.session import Session

Connect = Callable[[], ssl.SSLSocket]

TICK_S = 1.0  # between PINGs while nothing arrives
SILENCE_S, SILENCE_TRIPS = 5.0, 4  # a connection is dead after this time without a byte, and this number of round trips
GREETING_S = 10.0  # the same before the first frame: the peer may not have noticed that the last connection is dead
GOODBYE_S = 5.0  # for the acknowledgement of BYE alone
REPORT_S = 2.0  # shorter interruptions are not reported
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 2.0  # before attempts to connect
ACK_S = 0.02  # an acknowledgement waits this long for a frame to travel with
_READS, _WRITES = 32, 8  # reads of one record and writes of one batch while the lock is held
_CONTROL_BYTES, _MOST_CONTROL_BYTES = 1 << 14, 1 << 20
_TCP_NOTSENT_LOWAT = 25  # of <linux/tcp.h>
_UNSENT_BYTES = 1 << 18  # in the kernel: heartbeats and acknowledgements wait behind them
# RFC 8446, 5.5: keys of AES-GCM encrypt 24 million records. Python cannot change them, a new connection has new ones.
_KEY_BYTES = 1 << 38
_CHECKED_BYTES = 1 << 20  # after which the loss of a connection is looked at
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Channel:
    """One worker's end of a pair."""

    def __init__(self, peer: int, connect: Connect | None, *, patience_s: float, report: Callable[[str], None]) -> None:
        self.name, self.patience_s = f"worker {peer}", patience_s
        self.session = Session(self.name)
        self.control, self._control = socket.socketpair()  # of the worker, and of this channel
        self._connect, self._report = connect, report
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._connection: socket.socket | None = None
        self._attached: socket.socket | None = None
        self._failure: OSError | None = None  # of the connection, in another thread
        self._unwritten: deque[memoryview] = deque()
        self._blocked = False  # the socket takes no more now
        self._idle = False  # the thread waits for the socket, or is about to
        self._wake_read, self._wake_write = os.pipe()
        self._leaving = self._stopping = self._reported = self._control_ended = False
        self._connected, self._ended = threading.Event(), threading.Event()
        self._reason = "it has not connected yet"
        self._bytes = self._checked_bytes = 0  # read and written on this connection
        self._lost_s = self._silent_s = self._pinged_s = self._owing_s = self._round_trip_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._control.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"thinpipe-{self.name}", daemon=True)

    # From any thread

    def start(self) -> None:
        self._thread.start()

    def await_connection(self) -> str | None:
        """Wait until both ends know each other; return the error if the pair is lost before."""
        self._connected.wait()
        return self.session.error

    def attach(self, connection: socket.socket) -> None:
        """Continue with a new connection instead of the present one."""
        with self._lock:
            replaced = connection if self._ended.is_set() else self._attached
            if replaced is not connection:
                self._attached = connection
            self._alarm()
        if replaced is not None:
            _close(replaced)

    def send(self, stream: int, tag: int, view: memoryview) -> Operation:
        """Start sending a message."""
        with self._lock:
            operation = self.session.send(stream, tag, view)
            self._push()
        return operation

    def receive(self, stream: int, tag: int, view: memoryview) -> Operation:
        """Post a receive."""
        with self._lock:
            try:
                operation = self.session.receive(stream, tag, view)
            except FrameError as error:
                operation = Operation((stream, tag), 0, view)
                operation.finish(self._violated(error))
            if self.session.is_urgent:
                self._push()
        return operation

    def fail(self, error: str) -> None:
        """End the pair: its peer has ended, as is known from elsewhere."""
        with self._lock:
            self.session.fail(error)
            self._alarm()

    def leave(self) -> None:
        """Say goodbye after all sends and what the control channel holds."""
        with self._lock:
            if not self._leaving:
                self._leaving = True
                self._take_control()
                self.session.leave()
            self._alarm()

    def close(self, limit_s: float) -> None:
        """Wait until the peer has acknowledged the goodbye, then end the channel."""
        self.leave()
        if self._thread.ident is None:
            self._end()
            return
        self._ended.wait(limit_s)
        with self._lock:
            self._stopping = True
            self._alarm()
        self._thread.join(TICK_S)

    def _alarm(self) -> None:
        """Wake up the thread wherever it waits."""
        self._changed.notify_all()
        self._idle = True
        self._wake()

    def _wake(self) -> None:
        if self._idle and not self._ended.is_set():
            self._idle = False
            os.write(self._wake_write, b"x")

    def _push(self) -> None:
        """Write what the socket takes now, one batch at most; leave the rest to the thread."""
        if not self._idle or self._connection is None:
            return  # the thread writes before it waits
        if not self._blocked:
            try:
                if self._write(self._connection, 1):
                    return
            except OSError as error:
                self._failure = error
            except BaseException:  # a signal, perhaps after the bytes were written
                self._failure = ConnectionError("a signal interrupted a write")
                self._wake()
                raise
        elif not self.session.is_waiting:
            return  # the thread waits for the socket
        self._wake()

    # The thread

    def _run(self) -> None:
        try:
            while (connection := self._obtain()) is not None:
                try:
                    self._serve(connection)
                except OSError as error:
                    self._reason = describe(error)
                except FrameError as error:
                    with self._lock:
                        self._violated(error)
                finally:
                    with self._lock:
                        if self.session.error is not None:
                            with suppress(OSError):
                                self._write(connection, 1)  # what the peer should know
                        self._connection = self._failure = None
                        self._idle = self._blocked = False
                    _close(connection)
        except Exception as error:  # otherwise all who wait for the peer would wait forever
            with self._lock:
                self.session.fail(f"the connection to {self.name} failed: {describe(error)}")
        finally:
            self._end()

    def _is_over(self) -> bool:
        return self._stopping or self.session.finished or self.session.failed

    def _violated(self, error: FrameError) -> str:
        self.session.fail(f"{self.name} does not follow the protocol: {error}", report=True)
        self._alarm()
        return self.session.error or ""

    def _obtain(self) -> socket.socket | None:
        """Return the next connection; None if the pair has ended, or has been without one for too long."""
        while True:
            with self._lock:
                limit_s = min(self.patience_s, GOODBYE_S) if self.session.says_goodbye else self.patience_s
                if self._lost_s >= limit_s:
                    self.session.fail(f"{self.name} is gone: no connection for {self._lost_s:.0f} s ({self._reason})")
                if self._is_over() or self.session.left:
                    return None
                if self._attached is not None:
                    connection, self._attached = self._attached, None
                    return connection
            began = time.monotonic()
            with self._lock:
                if self._attached is None and not self._is_over():
                    self._changed.wait(self._pause_s)
            # While this process was stopped, or the machine slept, it did not try to connect.
            self._count_lost(min(time.monotonic() - began, 2 * self._pause_s))
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            if self._connect is not None and self._attached is None and not self._is_over():
                began = time.monotonic()
                try:
                    return self._connect()
                except OSError as error:
                    self._reason = describe(error)
                    if getattr(error, "final", False):
                        with self._lock:
                            self.session.fail(f"{self.name} cannot be connected: {self._reason}")
                finally:
                    self._count_lost(time.monotonic() - began)

    def _count_lost(self, seconds: float) -> None:
        self._lost_s += seconds
        if self._lost_s > REPORT_S and not self._reported:
            self._reported = True
            self._report(f"no connection to {self.name} ({self._reason}), trying for {self.patience_s:.0f} s")

    def _serve(self, connection: socket.socket) -> None:
        """Drive the session over a connection until that breaks, is replaced or is no longer needed."""
        connection.setblocking(False)
        with suppress(OSError):  # not TCP
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        socket_number, control_number = connection.fileno(), self._control.fileno()
        with self._lock:
            self.session.connect()
            self._unwritten.clear()
            self._connection = connection
            self._silent_s = self._pinged_s = 0.0
            self._bytes = self._checked_bytes = 0
        before, more = time.monotonic(), True
        ready = {socket_number: select.POLLIN}
        while True:
            with self._lock:
                self._idle = False
                if self._failure is not None:
                    raise self._failure
                if self._attached is not None or self._is_over():
                    return
                events = ready.get(socket_number, 0)
                more = self._read(connection) if more or events & ~select.POLLOUT else False
                now = time.monotonic()
                self._tick(min(now - before, TICK_S))  # in longer pauses this process was stopped, not the peer silent
                before = now
                if control_number in ready:
                    self._take_control()
                self._blocked &= not events & select.POLLOUT
                if not self._blocked:
                    more |= not self._write(connection, _WRITES) and not self._blocked
                more |= self._blocked and self.session.stage(_WRITES) > 0
                self._deliver_control()
                if self._is_over():
                    continue
                self._idle = not more
                timeout_s = 0 if more else ACK_S if self.session.owes_ack else TICK_S
                poller = select.poll()
                poller.register(self._wake_read, select.POLLIN)
                poller.register(socket_number, select.POLLIN | select.POLLOUT * self._blocked)
                if not self._control_ended and not self.session.is_urgent:
                    poller.register(control_number, select.POLLIN)
            ready = dict(poller.poll(timeout_s * 1000))
            if self._wake_read in ready:
                os.read(self._wake_read, 64)

    def _tick(self, seconds: float) -> None:
        """Count the time without a session or a byte of the peer, and send what is due."""
        session = self.session
        if session.resumed:
            if self._reported:
                self._report(f"connected to {self.name} again after {self._lost_s:.0f} s")
            self._lost_s, self._pause_s, self._reported = 0.0, FIRST_PAUSE_S, False
            if not self._connected.is_set():
                self._connected.set()
            limit_s = max(SILENCE_S, SILENCE_TRIPS * self._round_trip_s)
        else:
            self._count_lost(seconds)
            limit_s = min(GREETING_S, self.patience_s)
        if self._bytes > _KEY_BYTES and self._connect is not None:
            raise ConnectionError("its keys are used up")
        self._silent_s += seconds
        if self._silent_s > limit_s:
            raise ConnectionError(f"nothing has arrived for {self._silent_s:.0f} s")
        if self._silent_s - self._pinged_s >= TICK_S:
            self._pinged_s = self._silent_s
            session.ping(time.monotonic_ns())
        self._owing_s = self._owing_s + seconds if session.owes_ack else 0.0
        if self._owing_s >= ACK_S:
            session.acknowledge()

    def _read(self, connection: socket.socket) -> bool:
        """Read what has arrived; return True if there may be more."""
        session = self.session
        for _ in range(_READS):
            try:
                count = connection.recv_into(session.buffer())
            except _NOT_NOW:
                return False
            if not count:
                raise ConnectionError("it closed the connection")
            session.received(count)
            self._bytes += count
            self._silent_s = self._pinged_s = 0.0
            if session.echo:
                self._round_trip_s = min(max(time.monotonic_ns() - session.echo, 0) / 1e9, self.patience_s)
                session.echo = 0
        return True

    def _write(self, connection: socket.socket, batches: int) -> bool:
        """Write what the socket takes; return True if nothing is left."""
        if self._bytes >= self._checked_bytes:
            self._checked_bytes += _CHECKED_BYTES
            adapt_to_loss(connection)
        for _ in range(batches):
            if not self._unwritten:
                self._unwritten.extend(join_small(self.session.output()))
                if not self._unwritten:
                    return True
            while self._unwritten:
                frame = self._unwritten[0]
                try:
                    count = connection.send(frame)
                except _NOT_NOW:
                    self._blocked = True
                    return False
                self._bytes += count
                if count == len(frame):
                    self._unwritten.popleft()
                else:
                    self._unwritten[0] = frame[count:]
        return not self.session.has_output

    def _take_control(self) -> None:
        """Read what the worker sends over the control channel."""
        while not self._control_ended and not self.session.is_urgent:
            try:
                data = self._control.recv(_CONTROL_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._control_ended = not data
            if data:
                self.session.send_control(data)

    def _deliver_control(self) -> None:
        received = self.session.control
        if received:
            with suppress(OSError):  # its buffer is full, or the worker has closed it
                del received[: self._control.send(received)]
            if len(received) > _MOST_CONTROL_BYTES:
                raise FrameError(f"more than {_MOST_CONTROL_BYTES} bytes arrive on the control channel")

    def _end(self) -> None:
        with self._lock:
            lost = None if self._leaving or self.session.left else self.session.error
            self.session.fail(f"the connection to {self.name} is closed")
            self._ended.set()
            self._connected.set()
            if lost is not None:
                self.session.control += b"\n" + json.dumps({"end": lost}).encode() + b"\n"  # for control.Control
            self._deliver_control()
            self._control.close()
            if self._attached is not None:
                _close(self._attached)
            os.close(self._wake_read)
            os.close(self._wake_write)


def _close(connection: socket.socket) -> None:
    """Close a connection for the peer, too, if another process has inherited it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
