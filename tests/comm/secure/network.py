"""Meshes of one process or several, joined by TLS over loopback or by socket pairs, whose connections tests can cut."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from thinpipe.comm.secure.mesh import Mesh

Encrypt = Callable[[socket.socket, bool], socket.socket]  # a connection, and whether this end accepted it


def throwaway_tls(folder: Path) -> Encrypt:
    """Return a function that encrypts connections with the key in a folder; make one on first use."""
    path = folder / "throwaway.pem"
    if not path.exists():
        _make_key(path)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(path)
    server.num_tickets = 0
    client.check_hostname = False
    client.load_verify_locations(path)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3

    def encrypt(connection: socket.socket, accepted: bool) -> socket.socket:
        return (server if accepted else client).wrap_socket(connection, server_side=accepted)

    return encrypt


def _make_key(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
    certificate = builder.not_valid_after(now + datetime.timedelta(days=1)).sign(key, None)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + certificate.public_bytes(pem))


def plain(connection: socket.socket, accepted: bool) -> socket.socket:
    return connection


class Listener:
    """The listening socket of a worker: it attaches connections to the pairs of its mesh."""

    def __init__(self, mesh: Mesh, encrypt: Encrypt) -> None:
        self.mesh, self.encrypt = mesh, encrypt
        self.raw: list[socket.socket] = []  # duplicates of all connections: shutting one down cuts it
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with suppress(OSError, IndexError):  # cut in the handshake
                self.raw.append(connection.dup())
                connection.settimeout(20)
                peer = connection.recv(1)[0]
                self.mesh.attach(peer, self.encrypt(connection, True))

    def cut(self) -> None:
        """Cut the latest connection."""
        with suppress(OSError):  # it is cut already
            self.raw[-1].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join(30)
        for connection in self.raw:
            connection.close()


class Nat:
    """A connection between ``inside`` and ``outside`` that no longer forwards anything, and closes nothing, if told."""

    def __init__(self) -> None:
        self.inside, left = socket.socketpair()
        right, self.outside = socket.socketpair()
        self.forgotten = False
        self._ends = left, right
        self._threads = [threading.Thread(target=self._forward, args=way) for way in ((left, right), (right, left))]
        for thread in self._threads:
            thread.start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.forgotten:
                    target.sendall(data)

    def close(self) -> None:
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        for end in self._ends:
            end.close()


def dialler(own: int, port: int, encrypt: Encrypt) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port), 20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection.sendall(bytes([own]))
            return encrypt(connection, False)
        except OSError:
            connection.close()
            raise

    return connect


@contextmanager
def two_meshes(
    encrypt: Encrypt, *, patience_s: float = 60, lines: list[str] | None = None
) -> Iterator[tuple[list[Mesh], Listener]]:
    """Yield the meshes of worker 0, which listens, and of worker 1, in this process."""
    lines = [] if lines is None else lines
    meshes = [Mesh(rank, 2, patience_s=patience_s, report=lines.append) for rank in (0, 1)]
    listener = Listener(meshes[0], encrypt)
    meshes[0].pair(1, None)
    meshes[1].pair(0, dialler(1, listener.port, encrypt))
    starting = threading.Thread(target=meshes[0].start)
    starting.start()
    meshes[1].start()
    starting.join()
    try:
        yield meshes, listener
    finally:
        closing = threading.Thread(target=meshes[0].close, args=(10,))
        closing.start()
        meshes[1].close(10)
        closing.join()
        listener.close()
        for mesh in meshes:
            for control in mesh.control_sockets().values():
                control.close()
