"""The gate: the one listening socket of a machine, which passes connections on by their routes.

Strangers can connect, so nothing here waits for one peer, and nothing grows. Connections without a complete route are
limited in number, and so are handlers (each a handshake with a deadline); when one too many comes, the oldest of the
source with the most is closed. So a flood from one address displaces itself, not a peer from another one.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from thinpipe.comm.acceptor import Accepted, Acceptor, oldest_of_most_frequent
from thinpipe.comm.errors import describe
from thinpipe.comm.secure.handshake import DESK, ROUTE_BYTES, HandshakeError, tune

__all__ = ["DESK", "ROUTE_BYTES", "Gate"]

_ROUTE_S = 5.0  # for the 16 bytes, which are sent with the first packet
_MOST_HANDLED = 32  # connections in handlers at a time
_MOST_LINES, _PER_S = 5, 60.0  # reports, so that strangers do not fill a log


class Gate:
    """Accepts connections on a listening socket, and calls ``handle(route, raw)`` for each in a thread of its own.

    ``handle`` authenticates the peer, gives the connection to its owner and returns True; it returns False, or raises,
    if there is no such route or the peer is rejected: the gate closes ``raw`` then. It must return soon after the
    handshake: when more than _MOST_HANDLED connections are in handlers, the gate shuts the oldest down.
    ``report`` gets one line for an error of a handler, at most _MOST_LINES in _PER_S. The gate owns the listening
    socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        handle: Callable[[bytes, socket.socket], bool],
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._listener, self._handle, self._report = listener, handle, report
        self._acceptor = Acceptor(listener, lambda first: len(first) == ROUTE_BYTES, ROUTE_BYTES, _ROUTE_S)
        self._handled: dict[socket.socket, str] = {}  # duplicates of connections, with their sources; oldest first
        self._threads = 0  # including those whose connection was shut down
        self._reported: list[float] = []  # times of the last lines
        self._unreported = 0  # errors since the last line
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinpipe-gate", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and shut down the connections that are still in handlers."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._acceptor.close()
        self._listener.close()
        with self._lock:
            for connection in self._handled:
                _shut_down(connection)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            for accepted in self._acceptor.poll():
                self._start_handler(accepted)

    def _start_handler(self, accepted: Accepted) -> None:
        with self._lock:
            if len(self._handled) >= _MOST_HANDLED:
                oldest = list(self._handled)[oldest_of_most_frequent(list(self._handled.values()))]
                del self._handled[oldest]
                _shut_down(oldest)
            has_room = self._threads < 2 * _MOST_HANDLED  # else handlers do not end, although they were shut down
            self._threads += has_room
        if not has_room:
            accepted.connection.close()
            return
        try:
            threading.Thread(target=self._run_handler, args=(accepted,), name="thinpipe-gate", daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._end_handler(accepted, None, False)

    def _run_handler(self, accepted: Accepted) -> None:
        twin, is_taken = None, False
        try:
            tune(accepted.connection)
            # When TLS wraps the socket it gives its descriptor away; a duplicate can still be shut down.
            twin = accepted.connection.dup()
            with self._lock:
                self._handled[twin] = accepted.source
            is_taken = self._handle(accepted.first, accepted.connection)
        except Exception as error:  # of any kind: the gate must go on
            self._note(str(error) if isinstance(error, HandshakeError) else f"{accepted.source}: {describe(error)}")
        finally:
            self._end_handler(accepted, twin, is_taken)

    def _note(self, line: str) -> None:
        """Report an error, or count it if there were many lately."""
        now = time.monotonic()
        with self._lock:
            self._reported = [each for each in self._reported if now - each < _PER_S]
            if len(self._reported) == _MOST_LINES:
                self._unreported += 1
                return
            self._reported.append(now)
            more, self._unreported = self._unreported, 0
        self._report(f"{line} (and {more} more before that were not reported)" if more else line)

    def _end_handler(self, accepted: Accepted, twin: socket.socket | None, is_taken: bool) -> None:
        if not is_taken:
            accepted.connection.close()
        with self._lock:
            self._threads -= 1
            if twin is not None:
                self._handled.pop(twin, None)
                twin.close()


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # the peer was faster
        connection.shutdown(socket.SHUT_RDWR)
