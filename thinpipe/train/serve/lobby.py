"""The listening side of a client: a ticket for its servers, and the desks of those that have come."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from thinpipe.comm.addresses import address_and_port, address_towards, listen
from thinpipe.comm.errors import WorkerError
from thinpipe.comm.membership import print_line
from thinpipe.comm.secure.gate import DESK, Gate
from thinpipe.comm.secure.handshake import accept
from thinpipe.comm.secure.identity import own_identity
from thinpipe.comm.secure.peers import KnownPeers
from thinpipe.comm.secure.ticket import Admission, Ticket
from thinpipe.options import OptionError
from thinpipe.train.serve.desk import Desk, Gone, Rejected
from thinpipe.train.serve.peering import CONNECT_S, source_of

PORT = 7000  # unless another is given
TICKET_S = 24 * 3600.0  # for which a ticket admits new peers
JOIN = 10  # times the patience: how long a client waits for servers that people start by hand
JOIN_S = 600.0  # how long a server that takes one run waits for its client
_WAIT_S = 2.0


class Lobby:
    """The listening side of a client: servers that arrive with its ticket, until there are as many as the run needs."""

    def __init__(self, host: str, port: int, address: str | None, count: int) -> None:
        self._identity = own_identity()
        self._listener = open_listener(host, port)
        self._count, self._admission = count, Admission(KnownPeers())
        self._arrived: list[tuple[Desk, bytes]] = []
        self._closed = False
        self._lock = threading.Condition()
        self.take: Callable[[bytes, socket.socket], bool] = lambda route, raw: False  # connections of the run
        self._gate = Gate(self._listener, self._handle)
        where = ticket_address(host, self._listener.getsockname()[1], address)
        secret = self._admission.new_secret(count, TICKET_S)
        self.ticket = Ticket(*where, self._identity.fingerprint, secret)

    def start(self) -> None:
        self._gate.start()

    def wait(self, seconds: float) -> list[tuple[Desk, bytes]]:
        """Return the desks of all servers in the order of their arrival; raise WorkerError if some do not come."""
        until, shown = time.monotonic() + seconds, 0
        with self._lock:
            while len(self._arrived) < self._count:
                if time.monotonic() > until:
                    raise WorkerError(
                        f"{len(self._arrived)} of {self._count} servers have come within {seconds:.0f} s: type the "
                        "command above on each; is the port open in firewall and router?"
                    )
                self._lock.wait(_WAIT_S)
                self._arrived = [each for each in self._arrived if _is_there(each[0])]
                if len(self._arrived) != shown:
                    shown = len(self._arrived)
                    print_line(f"{shown} of {self._count} servers are here")
            self._closed = True
            return list(self._arrived)

    def close(self) -> None:
        self._gate.close()

    def _handle(self, route: bytes, raw: socket.socket) -> bool:
        if route != DESK:
            return self.take(route, raw)
        channel, fingerprint = accept(raw, self._identity, self._admission, deadline_s=CONNECT_S)
        desk = Desk(channel, f"the server at {source_of(channel)}")
        with self._lock:
            if not self._closed:
                self._arrived.append((desk, fingerprint))
                self._lock.notify_all()
                return True
        with suppress(Gone):
            desk.send(reject=f"all {self._count} servers of this run are here already")
        desk.close()
        return True


def parse_address(text: str, option: str, port: int = PORT) -> tuple[str, int]:
    """Return host and port of HOST:PORT, or of HOST alone; raise OptionError for anything else."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]/]+))(?::([0-9]{1,5}))?", text.strip())
    if match is None or not int(match[3] or port) < 1 << 16:
        raise OptionError(
            f"{{{option}}} is an address and a port, as in 0.0.0.0:{PORT}, with IPv6 addresses in brackets; "
            f"got {text[:60]!r}"
        )
    return match[1] or match[2], int(match[3] or port)


def ticket_address(host: str, port: int, address: str | None) -> tuple[str, int]:
    """Return host and port for the ticket of a listener: those given, or else where it listens itself."""
    return (public_host(host), port) if address is None else parse_address(address, "address", port)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise OptionError if there is none to be had."""
    try:
        return listen(host, port)
    except OSError as error:
        raise OptionError(
            f"{{listen}} is an address of this machine and a free port; {address_and_port(host, port)}: "
            f"{error.strerror or error}"
        ) from None


def public_host(host: str) -> str:
    """Return the address for a ticket of a listener: with 0.0.0.0 that of the default route."""
    if host not in ("0.0.0.0", "::", ""):
        return host
    try:
        return address_towards("2001:db8::1" if host == "::" else "192.0.2.1")  # of documentation: nothing is sent
    except OSError:
        return "127.0.0.1"


def _is_there(desk: Desk) -> bool:
    """Keep a desk connection alive; return False if the server has gone."""
    try:
        desk.send(wait=True)
        desk.poll()
    except (Gone, Rejected):
        desk.close()
        return False
    return True
