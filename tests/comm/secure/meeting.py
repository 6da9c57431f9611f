"""Both ends of a handshake in one process: what each gets, and the bytes between them."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from thinpipe.comm.secure.handshake import HandshakeError, accept, dial
from thinpipe.comm.secure.identity import Identity

DEADLINE_S = 20.0
Change = Callable[[str, int, bytes], bytes]  # sender, position in its stream, bytes -> bytes


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or its HandshakeError; every other error is raised."""
    try:
        return call()
    except HandshakeError as error:
        text = str(error)
        assert "_ssl.c" not in text
        assert "\n" not in text
        assert "SSL" not in text
        return error


def meet(listen: Callable[[socket.socket], Any], call: Callable[[socket.socket], Any]) -> tuple[Any, Any]:
    """Return the outcomes of both ends of a socket pair, each in a thread of its own."""
    ends = socket.socketpair()
    found: dict[int, Any] = {}

    def run(number: int, function: Callable[[socket.socket], Any]) -> None:
        try:
            found[number] = outcome(lambda: function(ends[number]))
        except Exception as error:
            found[number] = error
        finally:
            if not isinstance(found[number], (tuple, ssl.SSLSocket)):
                ends[number].close()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate((listen, call))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found[0], found[1]


def accepting(identity: Identity, whom: Any, deadline_s: float = DEADLINE_S, **options: Any) -> Callable[..., Any]:
    return lambda raw: accept(raw, identity, whom, deadline_s=deadline_s, **options)


def dialling(identity: Identity, pinned: bytes, deadline_s: float = DEADLINE_S, **options: Any) -> Callable[..., Any]:
    return lambda raw: dial(raw, identity, pinned, deadline_s=deadline_s, **options)


def tls_client(raw: socket.socket, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLSocket:
    """Return a channel to a listener by TLS alone, as an attacker has it, without any check."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    raw.settimeout(DEADLINE_S)
    return context.wrap_socket(raw)


def tls_server(raw: socket.socket, identity: Identity) -> ssl.SSLSocket:
    """Return a channel to a dialler by TLS alone, with this key."""
    raw.settimeout(DEADLINE_S)
    return identity.server_context.wrap_socket(raw, server_side=True)


def receive(stream: socket.socket, count: int) -> bytes:
    """Return ``count`` bytes, or what there is until the end of the stream."""
    received = b""
    while len(received) < count and (piece := stream.recv(count - len(received))):
        received += piece
    return received


def received_after(stream: socket.socket) -> bytes:
    """Return what comes until the end of the stream, an error included."""
    received = b""
    with suppress(OSError):
        while piece := stream.recv(1 << 16):
            received += piece
    return received


def with_certificate(key: EllipticCurvePrivateKey) -> bytes:
    """Return a valid key and certificate of another kind, in PEM."""
    name, now = x509.Name([]), datetime.now(UTC)
    certificate = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now).sign(key, SHA256())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + certificate.public_bytes(Encoding.PEM)


class Wire:
    """Joins the ends of two socket pairs, keeps the bytes of each direction, and may change them."""

    def __init__(self, change: Change = lambda sender, position, data: data) -> None:
        (self.listener, first), (second, self.dialler) = socket.socketpair(), socket.socketpair()
        self.sent = {"listener": b"", "dialler": b""}
        self._change, self._inner = change, (first, second)
        self._threads = [
            threading.Thread(target=self._pump, args=each, daemon=True)
            for each in (("listener", first, second), ("dialler", second, first))
        ]
        for thread in self._threads:
            thread.start()

    def _pump(self, sender: str, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                position = len(self.sent[sender])
                self.sent[sender] += data
                sink.sendall(self._change(sender, position, data))
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def join(self) -> None:
        """Wait until both ends are closed."""
        for thread in self._threads:
            thread.join(60)
        for end in self._inner:
            end.close()
