"""A proxy between two machines of a run: it records all bytes, and disturbs connections as a network does."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

_PIECE = 1 << 14
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST
_addresses = count(2)  # the last number of 127.0.0.n


class _Connection:
    """Two sockets, and the bytes between them."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.ends = near, far
        self.is_forgotten = False  # the network drops its packets without an error
        self.open_directions = 2

    def reset(self) -> None:
        for each in self.ends:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)  # wakes up the threads, which close


class Proxy:
    """Forwards connections to a port.

    ``most``: further connections are closed. ``rate``: bytes per second in each direction. ``change``: returns other
    bytes in place of those that pass.
    """

    def __init__(self, target: tuple[str, int], most: int = 1000) -> None:
        self.recorded: bytearray | None = None
        self.connections = 0
        self.rate: float | None = None
        self.change: Callable[[bytes], bytes] | None = None
        self._target, self._most, self._source = target, most, "127.0.0.1"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[_Connection] = set()
        self._lock = threading.Lock()
        self._passes = threading.Event()
        self._passes.set()
        self._is_down = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset all connections."""
        with self._lock:
            for each in self._open:
                each.reset()

    def set_down(self, is_down: bool) -> None:
        """Reset all connections, and refuse new ones, until the network is up again."""
        self._is_down = is_down
        if is_down:
            self.cut()

    def set_silent(self, is_silent: bool) -> None:
        """Forward nothing, without an error, until the network is up again."""
        (self._passes.clear if is_silent else self._passes.set)()

    def forget(self) -> None:
        """Drop all that is sent on present connections, without an error, as a NAT does after a timeout."""
        with self._lock:
            for each in self._open:
                each.is_forgotten = True

    def change_address(self) -> None:
        """Make new connections from another address."""
        self._source = f"127.0.0.{2 + next(_addresses) % 250}"

    def close(self) -> None:
        self._listener.close()
        self._passes.set()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                near, _ = self._listener.accept()
                if self._is_down or self.connections == self._most:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(self._target, 5, source_address=(self._source, 0))
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = _Connection(near, far)
                with self._lock:
                    self._open.add(connection)
                    self.connections += 1
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(connection, source, target), daemon=True).start()

    def _forward(self, connection: _Connection, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(_PIECE):
                self._passes.wait()
                if connection.is_forgotten:
                    continue
                if self.rate is not None:
                    time.sleep(len(data) / self.rate)
                if self.recorded is not None:
                    with self._lock:
                        self.recorded += data
                target.sendall(data if self.change is None else self.change(data))
            if not connection.is_forgotten:
                target.shutdown(socket.SHUT_WR)
        except OSError:
            if not connection.is_forgotten:
                connection.reset()
        with self._lock:
            connection.open_directions -= 1
            if not connection.open_directions:
                self._open.discard(connection)
                for each in connection.ends:
                    each.close()


def through(proxy: Proxy, ticket: str) -> str:
    """Return a ticket with the address of a proxy, as its owner may write it."""
    return ticket.replace(ticket.split("/")[2], f"127.0.0.1:{proxy.port}")


def target_of(ticket: str) -> tuple[str, int]:
    host, _, port = ticket.split("/")[2].rpartition(":")
    return host, int(port)


@contextmanager
def proxied(ticket: str, most: int = 1000) -> Iterator[tuple[Proxy, str]]:
    """Yield a proxy to the address of a ticket, and the ticket with the proxy's address."""
    proxy = Proxy(target_of(ticket), most)
    proxy.recorded = bytearray()
    try:
        yield proxy, through(proxy, ticket)
    finally:
        proxy.close()
