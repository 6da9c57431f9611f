"""Acceptance of connections by their first bytes, which strangers may never send: none delays another."""

from __future__ import annotations

import errno
import ipaddress
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

_MOST_PENDING = 64  # connections whose first bytes are incomplete
_POLL_S = 0.2
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_IPV6_NETWORK = 64  # bits: what one customer of a provider has


@dataclass(frozen=True)
class Accepted:
    """A connection, blocking again, its complete first bytes, and its source address."""

    connection: socket.socket
    first: bytes
    source: str


@dataclass
class _Pending:
    source: str
    until: float
    received: bytes = b""


class Acceptor:
    """Accepts connections on a listening socket, and reads the first bytes of all of them concurrently.

    ``is_complete`` is called with what a connection has sent, up to ``most_bytes``; not one byte more is read. A
    connection is closed if it takes longer than ``seconds``, and if it is the oldest of the source with the most when
    there are too many.
    """

    def __init__(
        self, listener: socket.socket, is_complete: Callable[[bytes], bool], most_bytes: int, seconds: float
    ) -> None:
        self._listener, self._is_complete, self._most_bytes, self._seconds = listener, is_complete, most_bytes, seconds
        self._pending: dict[socket.socket, _Pending] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def poll(self) -> list[Accepted]:
        """Wait up to _POLL_S for connections and bytes; return the connections whose first bytes are complete."""
        found = []
        for key, _ in self._selector.select(_POLL_S):
            connection = key.fileobj
            if connection is self._listener:
                self._accept()
            elif connection in self._pending:  # not closed meanwhile
                assert isinstance(connection, socket.socket)
                found += self._read(connection)
        now = time.monotonic()
        for connection in [each for each, pending in self._pending.items() if now >= pending.until]:
            self._drop(connection)
        return found

    def close(self) -> None:
        """Close all connections that were not returned; the listening socket belongs to the caller."""
        for connection in list(self._pending):
            self._drop(connection)
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                # The listening socket stays readable: without a pause this would spin.
                if self._pending:
                    self._drop(next(iter(self._pending)))
                time.sleep(_POLL_S / 10)
            return  # else the peer has disconnected
        connection.setblocking(False)
        if len(self._pending) >= _MOST_PENDING:
            sources = [pending.source for pending in self._pending.values()]
            self._drop(list(self._pending)[oldest_of_most_frequent(sources)])
        self._pending[connection] = _Pending(source_of(address), time.monotonic() + self._seconds)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> list[Accepted]:
        pending = self._pending[connection]
        try:
            received = connection.recv(self._most_bytes - len(pending.received))
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        pending.received += received
        if received and self._is_complete(pending.received):
            self._release(connection)
            connection.setblocking(True)
            return [Accepted(connection, pending.received, pending.source)]
        if not received or len(pending.received) >= self._most_bytes:
            self._drop(connection)
        return []

    def _release(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._pending[connection]

    def _drop(self, connection: socket.socket) -> None:
        self._release(connection)
        connection.close()


def source_of(address: object) -> str:
    """Return the address that a connection comes from; of IPv6 its network, since one host has many addresses there."""
    if not isinstance(address, tuple):
        return ""  # a Unix socket
    host = str(address[0]).partition("%")[0]
    parsed = ipaddress.ip_address(host)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, _IPV6_NETWORK), strict=False))
    return host


def oldest_of_most_frequent(sources: list[str]) -> int:
    """Return the index of the first one of the most frequent source: a flood from one address displaces itself."""
    return sources.index(Counter(sources).most_common(1)[0][0])
