"""The control channel: heartbeats between the client and every other worker, and the cause of a run's end.

    worker 1 ---.
                 >--- worker 0, the client
    worker 2 ---'

(1) Every second each end sends a heartbeat: its current ``Activity``, as a line of JSON of bounded length.
(2) A peer that sends no heartbeat for WARN_S is reported; LATE_S after ``--patience`` the run is aborted.
    Seconds in which this process itself was stopped (SIGSTOP, a suspended laptop) do not count as the peer's silence.
(3) If all workers wait for each other and none computes, a message was lost: the client aborts the run, too.
(4) A worker that ends sends the cause, and the client forwards it: every machine can name the first cause.

A thread does all of this, since the main thread may block in a call of torch that never returns.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinpipe.comm.errors import describe, is_secondary
from thinpipe.system.sanitize import one_line

IDLE_S, INTERVAL_S = 5, 3
# The longest pause before TCP retransmits, as a fraction of the patience. Without this limit it doubles each time, up
# to the time for which a link was down; a worker would then be silent for twice that.
RETRY = 0.2
# The same on the control channel. The kernel gives up after 15 retransmissions (net.ipv4.tcp_retries2): one a second
# ended connections after an outage of 15 s (measured on Linux 6.18), whatever the patience.
_CONTROL_RETRY = 1 / 6
_TCP_RTO_MAX_MS = 44  # of <linux/tcp.h>, from Linux 6.15 on; 1 to 120 s

_seen: set[tuple[int, str]] = set()  # descriptors that were already processed, with their targets


@dataclass
class Activity:
    """The current activity of this worker.

    Written by the main thread, read by the heartbeat thread: single values, so that no lock is needed.
    """

    step: int = 0  # of training; 0 before the first
    doing: str = "starting"
    waiting: bool = False  # for another worker
    done: int = 0  # progress counter: incremented for every finished operation
    longest_step_s: float = 0.0  # of this run's training steps

    def note(self, doing: str, step: int | None = None) -> None:
        self.doing = doing
        self.done += 1
        if step is not None:
            self.step = step

    def status(self) -> dict[str, Any]:
        """Return the content of a heartbeat. CPU time distinguishes computation from waiting inside torch.

        It is that of the main thread: gloo's threads can spin on a connection that broke in the middle of a message.
        """
        return {
            "step": self.step,
            "doing": self.doing,
            "waiting": self.waiting,
            "done": self.done,
            "cpu_s": time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0)),
        }


ACTIVITY = Activity()  # of this process


@contextmanager
def waiting() -> Iterator[None]:
    """Mark this worker as waiting during a call that depends on another worker; in other threads, count progress."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        ACTIVITY.waiting = True
    try:
        yield
    finally:
        if is_main:
            ACTIVITY.waiting = False
        ACTIVITY.done += 1


def keep_alive(patience_s: float, control: Collection[int] = ()) -> None:
    """Set TCP options on the connections opened since the last call; gloo has no setting for them.

    The kernel retransmits once per RETRY * ``patience_s`` or more often, _CONTROL_RETRY on descriptors in ``control``.
    It probes idle connections, so that one whose peer is gone fails after ``patience_s``. There is no TCP_USER_TIMEOUT:
    it keeps counting over short outages between which data is acknowledged (seen on Linux 6.18), and ends working
    connections. Heartbeats find a peer that is lost.
    """
    folder = Path("/proc/self/fd")
    if not folder.is_dir():  # not Linux: the system's defaults apply
        return
    here = set()
    for name in os.listdir(folder):
        try:
            what = os.readlink(folder / name)
        except OSError:  # closed meanwhile
            continue
        if what.startswith("socket:"):
            here.add((int(name), what))
    for descriptor, _ in here - _seen:
        _set(descriptor, patience_s, patience_s * (_CONTROL_RETRY if descriptor in control else RETRY))
    _seen.clear()
    _seen.update(here)


def _set(descriptor: int, patience_s: float, retry_s: float) -> None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as peer:
            if peer.type == socket.SOCK_STREAM and peer.family in (socket.AF_INET, socket.AF_INET6):
                set_keep_alive(peer, patience_s, retry_s)
    except OSError:  # closed meanwhile, not a socket, or an older Linux without the last option
        return


def set_keep_alive(peer: socket.socket, patience_s: float, retry_s: float | None = None) -> None:
    """Set the TCP options of ``keep_alive`` on one connection; raise OSError if the kernel lacks the last one."""
    retry_s = patience_s * RETRY if retry_s is None else retry_s
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(patience_s / INTERVAL_S)))
    peer.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, round(min(max(retry_s, 1), 120) * 1000))


TICK_S = 1.0
WARN_S = 10.0
# A heartbeat and a retransmission: if an outage is shorter than the patience, silence is at most this much longer.
LATE_S = 2.0
GRACE_S = 5.0  # time for a worker that knows the cause to exit by itself
_LONGEST = 1 << 16  # bytes of a line; a peer that sends more is not a worker of thinpipe
_BUSY = 0.1  # of a core: a worker with less CPU time than that is waiting


@dataclass
class Peer:
    """The other end of one connection."""

    connection: socket.socket
    received: bytes = b""  # the beginning of its next line
    unsent: bytes = b""  # the end of the last lines to it: its receive buffer, and the send buffer here, are full
    status: dict[str, Any] = field(default_factory=dict)
    silent_s: float = 0.0
    reported_s: float = 0.0  # its silence when it was last reported
    gone: bool = False

    def where(self) -> str:
        if not self.status:
            return "no heartbeat yet"
        return f"last: step {self.status['step']}, {self.status['doing']}"

    def send(self, message: Mapping[str, Any], *, droppable: bool = False) -> None:
        """Send a line without blocking; bytes that do not fit into the send buffer are sent before the next line.

        ``droppable``: omit this line while an earlier one is unsent, so that the unsent bytes do not grow.
        """
        if not (droppable and self.unsent):
            self.unsent += json.dumps(message).encode() + b"\n"
        with suppress(OSError):  # the buffer is full, or the connection has failed, which the next read reports
            self.unsent = self.unsent[self.connection.send(self.unsent) :]


class Control:
    """This worker's end of the control channel."""

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        *,
        patience_s: float,
        report: Callable[[str], None],  # prints a line
        end: Callable[[str], Any],  # ends this process; called from the thread
    ) -> None:
        self.rank, self.patience_s = rank, patience_s
        self.cause: str | None = None  # why the run ends, received from another worker
        self._report, self._end = report, end
        self._peers = {number: Peer(connection) for number, connection in connections.items()}
        self._known, self._closed = threading.Event(), threading.Event()
        self._sending = threading.Lock()  # the main thread sends the cause, the control thread everything else
        self._ending_s: float | None = None  # since the cause is known
        self._stuck_s, self._stuck_at = 0.0, (-1, 0.0)
        self._thread = threading.Thread(target=self._run, name="thinpipe-control", daemon=True)
        for peer in self._peers.values():
            peer.connection.setblocking(False)
        self._thread.start()

    def first_cause(self, error: BaseException) -> str:
        """Return why this worker ends: its own error, or the received cause if that follows from a lost worker."""
        if is_secondary(error):
            self._known.wait(TICK_S)
            if self.cause is not None:
                return self.cause
        return f"worker {self.rank}: {describe(error)}"

    def announce(self, cause: str) -> None:
        """(4) Send the other workers the cause of this worker's end."""
        for peer in self._peers.values():
            self._send(peer, {"end": cause})

    def close(self) -> None:
        """Close the channel after a normal end of this worker."""
        for peer in self._peers.values():
            self._send(peer, {"bye": True})
        self._closed.set()
        self._thread.join(2 * TICK_S)
        for peer in self._peers.values():
            peer.connection.close()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # without the control channel, a run could hang forever
            self._finish(f"worker {self.rank}: the control channel failed: {describe(error)}")

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for number, peer in self._peers.items():
            selector.register(peer.connection, selectors.EVENT_READ, number)
        ticked = time.monotonic()
        while not self._closed.is_set():
            for key, _ in selector.select(TICK_S / 4):
                if not self._receive(key.data):
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if now - ticked >= TICK_S:
                self._tick(min(now - ticked, 2 * TICK_S))
                ticked = now

    def _tick(self, seconds: float) -> None:
        keep_alive(self.patience_s + GRACE_S, {peer.connection.fileno() for peer in self._peers.values()})
        if self.cause is not None:
            self._ending_s = seconds + (self._ending_s or 0.0)
            if self._ending_s > GRACE_S:
                self._end(self.cause)
            return
        for number, peer in self._peers.items():
            self._send(peer, ACTIVITY.status(), droppable=True)  # (1)
            if not peer.gone:
                self._count_silence(number, peer, seconds)
        if self.rank == 0 and self._peers:
            self._count_standstill(seconds)

    def _count_silence(self, number: int, peer: Peer, seconds: float) -> None:
        """Count the silence of a peer; report it or abort the run, (2)."""
        peer.silent_s += seconds
        if peer.silent_s >= self.patience_s + LATE_S:
            self._finish(f"worker {number} has been silent for {peer.silent_s:.0f} s ({peer.where()})")
        elif peer.silent_s >= max(WARN_S, 2 * peer.reported_s):
            peer.reported_s = peer.silent_s
            self._report(f"waiting for worker {number}, silent for {peer.silent_s:.0f} s ({peer.where()})")

    def _count_standstill(self, seconds: float) -> None:
        """Abort the run if all workers have waited for each other for too long, (3)."""
        everyone = [ACTIVITY.status(), *(peer.status for peer in self._peers.values())]
        # While a link is down nothing can arrive, and afterwards TCP may take RETRY * patience to retransmit.
        cut = any(peer.silent_s > LATE_S for peer in self._peers.values())
        if cut or not all(status and status["waiting"] for status in everyone):
            self._stuck_s = 0.0
            return
        done, cpu_s = sum(status["done"] for status in everyone), sum(status["cpu_s"] for status in everyone)
        if done != self._stuck_at[0] or cpu_s - self._stuck_at[1] > _BUSY * max(self._stuck_s, WARN_S):
            self._stuck_s, self._stuck_at = 0.0, (done, cpu_s)
        self._stuck_s += seconds
        if self._stuck_s >= self.patience_s:
            places = "; ".join(f"worker {n}: step {s['step']}, {s['doing']}" for n, s in enumerate(everyone))
            self._finish(
                f"all workers have waited for each other for {self._stuck_s:.0f} s, a message is lost: {places}"
            )

    def _finish(self, cause: str) -> None:
        self.announce(cause)
        self._end(cause)

    def _receive(self, number: int) -> bool:
        """Read the lines that a peer has sent; return False if no more will follow."""
        peer, how = self._peers[number], "it closed the connection"
        try:
            received = peer.connection.recv(_LONGEST)
        except BlockingIOError:
            return True
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, type(error).__name__)
            received, how = b"", f"{(error.strerror or str(error)).lower()} ({name})"
        *lines, peer.received = (peer.received + received).split(b"\n")
        if len(peer.received) > _LONGEST:
            received, how = b"", f"it sent a line of more than {_LONGEST} bytes"
        if not received:
            peer.gone = True
            self._adopt(f"worker {number} is gone: {how}, {peer.where()}", number)
            return False
        if peer.reported_s:
            self._report(f"worker {number} is back after {peer.silent_s:.0f} s")
        peer.silent_s = peer.reported_s = 0.0
        return all([self._process(number, peer, line) for line in lines])

    def _process(self, number: int, peer: Peer, line: bytes) -> bool:
        try:
            message = json.loads(line)
            if "bye" in message:
                peer.gone = True
                return False
            if "end" in message:
                self._adopt(one_line(str(message["end"])[:2000]), number)
            else:
                peer.status = {
                    "step": int(message["step"]),
                    "doing": one_line(str(message["doing"])[:200]),
                    "waiting": bool(message["waiting"]),
                    "done": int(message["done"]),
                    "cpu_s": float(message["cpu_s"]),
                }
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            pass  # a damaged line: the next one arrives within a second
        return True

    def _adopt(self, cause: str, source: int) -> None:
        if self.cause is not None:
            return
        self.cause = cause
        self._known.set()
        for number, peer in self._peers.items():
            if number != source:
                self._send(peer, {"end": cause})

    def _send(self, peer: Peer, message: Mapping[str, Any], *, droppable: bool = False) -> None:
        with self._sending:
            if not peer.gone:
                peer.send(message, droppable=droppable)
