"""The relay of two servers that cannot reach each other: the client splices the byte streams of two connections.

TLS runs from server to server through the splice: the client sees encrypted bytes only. A leg is the connection of one
of the two servers to the client, in the direction in which they can connect. When a leg breaks, the other is closed,
too, so that both servers notice and connect again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from thinpipe.comm.secure.handshake import HandshakeError

_PIECE = 1 << 18  # bytes read at a time: also the most that is in this process, per direction; TCP slows the sender
_AGAIN_S = 0.5


def splice(one: socket.socket, other: socket.socket) -> None:
    """Forward bytes in both directions until both have ended; close both. A half-closed direction leaves the other."""
    back = threading.Thread(target=_forward, args=(other, one), name="thinpipe-relay", daemon=True)
    back.start()
    _forward(one, other)
    back.join()
    one.close()
    other.close()


def _forward(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes until the source ends, then end this direction of the target; after an error, end all of both."""
    buffer = memoryview(bytearray(_PIECE))
    try:
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            with suppress(OSError):  # closed already
                each.shutdown(socket.SHUT_RDWR)


class Relay:
    """The two legs of one pair of servers, spliced whenever both are there.

    ``dial`` makes the leg to one of the servers; None: the servers dial, and ``attach`` is called.
    """

    def __init__(self, workers: tuple[int, int], dial: Callable[[int], socket.socket] | None) -> None:
        self._workers, self._dial = workers, dial
        self._legs: dict[int, socket.socket] = {}  # not spliced yet
        self._spliced: tuple[socket.socket, ...] = ()
        self._lock, self._closed = threading.Lock(), threading.Event()

    def start(self) -> None:
        if self._dial is not None:
            threading.Thread(target=self._keep_dialling, name="thinpipe-relay", daemon=True).start()

    def attach(self, worker: int, leg: socket.socket) -> None:
        """Take the leg that a server has dialled; its earlier one is obsolete."""
        with self._lock:
            if self._closed.is_set():
                leg.close()
                return
            _end(*self._spliced)
            _end(*(each for each in (self._legs.pop(worker, None),) if each is not None))
            self._spliced = ()
            self._legs[worker] = leg
            if len(self._legs) < 2:
                return
            self._spliced = tuple(self._legs.values())
            self._legs = {}
            threading.Thread(target=splice, args=self._spliced, name="thinpipe-relay", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            _end(*self._spliced, *self._legs.values())

    def _keep_dialling(self) -> None:
        """Dial both servers, splice until a leg breaks, and dial them again."""
        assert self._dial is not None
        while not self._closed.is_set():
            legs: list[socket.socket] = []
            try:
                for worker in self._workers:
                    legs.append(self._dial(worker))
            except (OSError, HandshakeError):  # the workers report a pair that stays lost
                _end(*legs)
                time.sleep(_AGAIN_S)
                continue
            with self._lock:
                self._spliced = tuple(legs)
                if self._closed.is_set():
                    _end(*legs)
            splice(*legs)
            self._closed.wait(_AGAIN_S)


def _end(*legs: socket.socket) -> None:
    """End both directions; the thread that splices them closes them."""
    for leg in legs:
        with suppress(OSError):
            leg.shutdown(socket.SHUT_RDWR)
