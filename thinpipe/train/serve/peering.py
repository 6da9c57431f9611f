"""The connections of one worker to the others: dialled, accepted or relayed, authenticated, and given to the mesh."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from thinpipe.comm.secure.handshake import accept, connect, dial
from thinpipe.comm.secure.identity import Identity
from thinpipe.comm.secure.mesh import Mesh
from thinpipe.train.serve.roster import Dialers, Roster

Address = tuple[str, int]
CONNECT_S = 10.0  # for TCP, and again for the handshake
_RELAYED_S = 30.0  # for a handshake through the client, which waits for the other server's leg


def source_of(channel: socket.socket) -> str:
    """Return the address of a peer, for messages."""
    with suppress(OSError):
        return str(channel.getpeername()[0])
    return "an unknown address"


def may_dial(host: str, client: str) -> bool:
    """Return True if a server may connect to an address that a client at ``client`` names.

    Not to this machine, its own link or groups, where services may trust whoever connects, unless the client is on this
    machine, too.
    """
    if ipaddress.ip_address(client.partition("%")[0]).is_loopback:
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    return not any(
        each.is_loopback or each.is_link_local or each.is_multicast or each.is_unspecified
        for address in addresses
        for each in (address, getattr(address, "ipv4_mapped", None) or address)
    )


class Peering:
    """The pairs of one worker with all others, each with the key that the roster has."""

    def __init__(self, roster: Roster, worker: int, identity: Identity, mesh: Mesh) -> None:
        self._roster, self._worker, self._identity, self._mesh = roster, worker, identity, mesh
        self._routes = roster.routes(worker)

    def add_pairs(self, dialers: Dialers, client: Address | None, *, dials_servers: bool = False) -> None:
        """Add all pairs to the mesh.

        ``client``: the address of the client, if this server dials it; ``dials_servers``: True on a client that dials
        its servers.
        """
        for peer in range(len(self._roster.entries)):
            if peer != self._worker:
                self._mesh.pair(peer, self._connector(peer, dialers, client, dials_servers))

    def arrived(self, route: bytes, raw: socket.socket) -> bool:
        """Authenticate a connection that another worker or the client's relay has dialled; False: an unknown route."""
        peer = self._routes.get(route)
        if peer is None:
            return False
        is_leg = route == self._roster.leg(self._worker, peer)
        self._mesh.attach(peer, self._secure(peer, raw, dials=is_leg and self._worker > peer, relayed=is_leg))
        return True

    def _connector(
        self, peer: int, dialers: Dialers, client: Address | None, dials_servers: bool
    ) -> Callable[[], ssl.SSLSocket] | None:
        """Return the function that connects to a peer; None if the peer connects, or the client's relay does."""
        entry, route = self._roster.entries[peer], self._roster.route(self._worker, peer)
        address = (entry.host, entry.port) if entry.host is not None else None
        is_relayed = False
        if peer == 0:
            address = client
        elif self._worker == 0:
            address = address if dials_servers else None
        else:
            dialer = dialers[min(self._worker, peer), max(self._worker, peer)]
            is_relayed = dialer is None
            if is_relayed:
                address, route = client, self._roster.leg(self._worker, peer)
            elif dialer != self._worker:
                address = None
        if address is None:
            return None
        host, port = address

        def connector() -> ssl.SSLSocket:
            raw = connect(host, port, route, timeout_s=CONNECT_S)
            dials = not is_relayed or self._worker > peer
            return self._secure(peer, raw, dials=dials, relayed=is_relayed)

        return connector

    def _secure(self, peer: int, raw: socket.socket, *, dials: bool, relayed: bool) -> ssl.SSLSocket:
        """Return the encrypted connection to a peer; of two relayed servers the higher number is the TLS client."""
        key, route = self._roster.fingerprint(peer), self._roster.route(self._worker, peer)
        deadline_s = _RELAYED_S if relayed else CONNECT_S
        if dials:
            return dial(raw, self._identity, key, route=route, deadline_s=deadline_s)
        return accept(raw, self._identity, key, route=route, deadline_s=deadline_s)[0]
