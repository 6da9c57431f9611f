"""The handshake of a connection: TLS 1.3 with the listener's pinned key, then the proof of the dialler's key.

    dialling side                                      listening side
    (1)  connects, sends the 16 bytes of the route     reads them, finds out whom the connection is for
    (2)  TLS 1.3; checks the listener's key: no        TLS 1.3 with its key; asks for no certificate, since Python's
         other peer gets a byte inside the channel     ``ssl`` cannot accept unknown self-signed ones
    (3)                                                sends a fresh challenge
    (4)  sends its key, a signature over challenge,    checks the signature, then whether it admits this key
         listener's key and route, and, with a
         ticket, an HMAC of the same by the secret
    (5)                                                sends its verdict, one byte

The signature binds to the channel by the listener's key: only the owner of that key is at the other end of the channel,
and a proof for one listener is worth nothing at another. (Python has ``tls-unique`` only, which TLS 1.3 leaves
undefined.) Routes travel in the clear, so the proof covers the route too: who exchanges those of two connections is
found out. All messages have a fixed length, and one deadline holds for the whole handshake.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from thinpipe.comm.addresses import address_and_port
from thinpipe.comm.control import set_keep_alive
from thinpipe.comm.secure.identity import Identity, fingerprint_of, fingerprint_text, public_key_of
from thinpipe.comm.secure.ticket import Admission, Verdict

ROUTE_BYTES = 16
DESK = bytes(ROUTE_BYTES)  # the route to the front desk; all others are random
# Changes with every incompatible version of the handshake. It begins neither as what TLS signs nor as a certificate.
_LABEL = b"thinpipe handshake 1\n"
_CHALLENGE_BYTES, _KEY_BYTES, _SIGNATURE_BYTES, _MAC_BYTES = 32, 32, 64, 32
_PROOF_BYTES = len(_LABEL) + _KEY_BYTES + _SIGNATURE_BYTES + _MAC_BYTES
_NO_SECRET = bytes(_MAC_BYTES)  # in place of the HMAC
_LOST_SEGMENTS, _LOSS = 20, 0.004  # of them, more than queues lose that overflow now and then
_TCP_INFO_BYTES, _TCP_INFO_SEGMENTS = 144, (100, 136)  # of <linux/tcp.h>: tcpi_total_retrans, tcpi_segs_out
_PATIENCE_S = 60.0  # for keep-alive, as the default of --patience
_NOT_TLS = {"HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG"}
_OLD_TLS = {"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "WRONG_SSL_VERSION"}
_REASONS = {
    Verdict.ADMITTED: "",
    Verdict.BAD_PROOF: "the proof of the key is not valid for this connection",
    Verdict.UNKNOWN: "the key is unknown, and no ticket was given; use a new ticket",
    Verdict.WRONG_SECRET: "the ticket is not one of this listener, or of an earlier start; use a new ticket",
    Verdict.EXPIRED: "the ticket has expired; use a new ticket",
    Verdict.EXHAUSTED: "the ticket has admitted as many new peers as it may; use a new ticket",
    Verdict.NOT_ALLOWED: "its owner does not allow this key; give the owner the one that `thinpipe peers` shows",
    Verdict.UNEXPECTED: "the key is not that of the worker expected on this connection",
    Verdict.FAILED: "the listener failed to look up the key; look at its output",
}


class HandshakeError(ConnectionError):
    """A connection was not authenticated. ``final``: another attempt would fail in the same way."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


def connect(host: str, port: int, route: bytes, *, timeout_s: float, patience_s: float = _PATIENCE_S) -> socket.socket:
    """Return a connection to a listener, with the route sent, (1); each address of the host has ``timeout_s``."""
    assert len(route) == ROUTE_BYTES
    try:
        raw = socket.create_connection((host, port), timeout_s)
    except (OSError, UnicodeError) as error:  # the latter for a name that cannot be one
        where, problem = address_and_port(host, port), getattr(error, "strerror", None) or error
        raise HandshakeError(
            f"{where} does not answer ({problem}): look at the address, the firewall and that machine"
        ) from None
    with _handshake(raw, timeout_s) as handshake:
        tune(raw, patience_s)
        handshake.send(route)
        raw.settimeout(None)
        return raw


def tune(raw: socket.socket, patience_s: float = _PATIENCE_S) -> None:
    """Set the TCP options of a connection that carries a run."""
    with suppress(OSError):  # not TCP, or an older Linux
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_keep_alive(raw, patience_s)
    # A pipeline sends bursts and waits. cubic sends them as fast as the link takes them; bbr derives a lower rate from
    # such traffic, and paces: 8 % fewer samples/s at 20 ms.
    _set_congestion_control(raw, b"cubic")


def adapt_to_loss(raw: socket.socket) -> None:
    """Change to bbr if segments are lost: with 1 % of loss at 100 ms it is near the line rate, cubic at 3 Mbit/s."""
    try:
        info = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except (OSError, AttributeError):  # not TCP; not Linux
        return
    if len(info) == _TCP_INFO_BYTES:  # an older Linux has less
        (repeated,), (sent,) = (struct.unpack_from("I", info, at) for at in _TCP_INFO_SEGMENTS)
        if repeated >= _LOST_SEGMENTS and repeated > _LOSS * sent:
            _set_congestion_control(raw, b"bbr")


def _set_congestion_control(raw: socket.socket, name: bytes) -> None:
    if hasattr(socket, "TCP_CONGESTION"):  # Linux
        with suppress(OSError):  # not in the kernel, or reserved for root (net.ipv4.tcp_allowed_congestion_control)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)


def dial(
    raw: socket.socket,
    identity: Identity,
    pinned: bytes,
    *,
    secret: bytes | None = None,
    route: bytes = DESK,
    deadline_s: float,
) -> ssl.SSLSocket:
    """Return the encrypted channel to the listener with the pinned fingerprint, after it has admitted this machine.

    ``route``: that of the pair, if it is not the front desk; both ends must pass the same. ``raw`` is closed on errors.
    """
    with _handshake(raw, deadline_s) as handshake:
        channel, peer = handshake.encrypt(_client_context(), server_side=False), handshake.peer  # (2)
        listener_key = _pinned_key(channel, peer, pinned)
        greeting = handshake.receive(len(_LABEL) + _CHALLENGE_BYTES)  # (3)
        if not greeting.startswith(_LABEL):
            raise HandshakeError(f"{peer} has another version of the handshake: install the same version of thinpipe")
        handshake.send(prove(identity, greeting[len(_LABEL) :], listener_key, route, secret))  # (4)
        verdict = handshake.receive(1)[0]  # (5)
        if verdict not in _REASONS:
            raise HandshakeError(f"{peer} answers {verdict}, which this version of thinpipe does not know", final=True)
        if verdict != Verdict.ADMITTED:
            reason = _REASONS[Verdict(verdict)]
            raise HandshakeError(f"{peer} rejected this machine: {reason}", final=verdict != Verdict.FAILED)
        channel.settimeout(None)
        return channel


def accept(
    raw: socket.socket,
    identity: Identity,
    admission_or_expected: Admission | bytes,
    *,
    route: bytes = DESK,
    deadline_s: float,
) -> tuple[ssl.SSLSocket, bytes]:
    """Return the encrypted channel to a dialler and its fingerprint, if the admission accepts it.

    Within a run, the fingerprint of the expected peer takes the place of the admission. ``raw`` is closed on errors.
    """
    with _handshake(raw, deadline_s) as handshake:
        channel, peer = handshake.encrypt(identity.server_context, server_side=True), handshake.peer  # (2)
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        handshake.send(_LABEL + challenge)  # (3)
        proof = handshake.receive(_PROOF_BYTES)  # (4)
        name = peer.rpartition(":")[0]  # until the peer sends a better one
        fingerprint, problem = b"", ""
        try:
            verdict, fingerprint = judge(proof, challenge, identity, route, admission_or_expected, name)
        except (OSError, ValueError) as error:
            verdict, problem = Verdict.FAILED, f": {error}"
        handshake.send(bytes([verdict]))  # (5)
        if verdict != Verdict.ADMITTED:
            known = f" (key {fingerprint_text(fingerprint)})" if fingerprint else ""
            raise HandshakeError(f"{peer}{known} was rejected: {_REASONS[verdict]}{problem}", final=True)
        channel.settimeout(None)
        return channel, fingerprint


def prove(identity: Identity, challenge: bytes, listener_key: bytes, route: bytes, secret: bytes | None) -> bytes:
    """Return the proof of the dialler's key, and of the secret if there is one, (4)."""
    signature = identity.sign(_LABEL + challenge + listener_key + route)
    mac = _NO_SECRET if secret is None else _mac(secret, challenge, identity.public_key, listener_key, route)
    return _LABEL + identity.public_key + signature + mac


def judge(
    proof: bytes,
    challenge: bytes,
    identity: Identity,
    route: bytes,
    admission_or_expected: Admission | bytes,
    name: str,
) -> tuple[Verdict, bytes]:
    """Return the verdict on a proof, and the fingerprint of the dialler once it has proved its key, else no bytes.

    A dialler that has not proved a key gets no other verdict than BAD_PROOF. ``name``: under which a new peer is known.
    """
    if len(proof) != _PROOF_BYTES or not proof.startswith(_LABEL):
        return Verdict.BAD_PROOF, b""
    key, rest = proof[len(_LABEL) :][:_KEY_BYTES], proof[len(_LABEL) + _KEY_BYTES :]
    signature, mac = rest[:_SIGNATURE_BYTES], rest[_SIGNATURE_BYTES:]
    try:
        signed = _LABEL + challenge + identity.public_key + route
        Ed25519PublicKey.from_public_bytes(key).verify(signature, signed)
    except (InvalidSignature, ValueError):
        return Verdict.BAD_PROOF, b""
    fingerprint = fingerprint_of(key)
    if isinstance(admission_or_expected, bytes):
        is_expected = hmac.compare_digest(fingerprint, admission_or_expected)
        return Verdict.ADMITTED if is_expected else Verdict.UNEXPECTED, fingerprint

    def proves(secret: bytes) -> bool:
        return hmac.compare_digest(mac, _mac(secret, challenge, key, identity.public_key, route))

    return admission_or_expected.admit(fingerprint, name, None if mac == _NO_SECRET else proves), fingerprint


def _mac(secret: bytes, challenge: bytes, dialler_key: bytes, listener_key: bytes, route: bytes) -> bytes:
    return hmac.digest(secret, _LABEL + challenge + dialler_key + listener_key + route, "sha256")


@cache
def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The name and the issuer of the certificate mean nothing. That the listener has the key of its certificate is
    # checked by TLS in any case, and that it is the pinned key by dial.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _pinned_key(channel: ssl.SSLSocket, peer: str, pinned: bytes) -> bytes:
    """Return the listener's public key; raise HandshakeError unless it is the pinned one."""
    try:
        key = public_key_of(channel.getpeercert(binary_form=True) or b"")
    except ValueError as error:
        raise HandshakeError(f"{peer} is not the expected machine: {error}", final=True) from None
    if not hmac.compare_digest(fingerprint_of(key), pinned):
        raise HandshakeError(
            f"{peer} has the key {fingerprint_text(fingerprint_of(key))}, and {fingerprint_text(pinned)} is expected: "
            "another machine answers there, or its key was replaced; look at the address, or use a new ticket",
            final=True,
        )
    return key


class _Handshake:
    """A connection during its handshake, with one deadline for all that is sent and received."""

    def __init__(self, raw: socket.socket, deadline_s: float) -> None:
        self.stream, self.peer = raw, _peer_text(raw)
        self._until = time.monotonic() + deadline_s

    def encrypt(self, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
        self.stream.settimeout(None)  # a non-blocking socket would be checked for early data
        channel = context.wrap_socket(self.stream, server_side=server_side, do_handshake_on_connect=False)
        self.stream = channel
        channel.settimeout(self._left())
        channel.do_handshake()  # the timeout is that of the whole call
        return channel

    def send(self, data: bytes) -> None:
        self.stream.settimeout(self._left())
        self.stream.sendall(data)

    def receive(self, count: int) -> bytes:
        """Return exactly ``count`` bytes; no more are read, since they belong to what follows the handshake."""
        received = b""
        while len(received) < count:
            self.stream.settimeout(self._left())
            piece = self.stream.recv(count - len(received))
            if not piece:
                raise ConnectionError("the connection was closed")
            received += piece
        return received

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


@contextmanager
def _handshake(raw: socket.socket, deadline_s: float) -> Iterator[_Handshake]:
    """Close the connection on errors, and raise them as HandshakeError in words of this project."""
    handshake = _Handshake(raw, deadline_s)
    try:
        yield handshake
    except BaseException as error:
        handshake.stream.close()
        raw.close()
        if isinstance(error, OSError) and not isinstance(error, HandshakeError):
            raise HandshakeError(f"{handshake.peer} {_problem(error, deadline_s)}") from None
        raise


def _problem(error: OSError, deadline_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"did not complete the handshake within {deadline_s:g} s: look at the network between, and try again"
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError)):
        return "closed the connection during the handshake: look at its output"
    if reason in _NOT_TLS:
        return "does not speak TLS, so it is not thinpipe: look at address and port"
    if reason in _OLD_TLS:
        return "offers no TLS 1.3, which thinpipe requires: look at the address, or for a proxy in between"
    if isinstance(error, ssl.SSLError):
        return f"sent a damaged handshake ({reason.lower().replace('_', ' ') or 'no reason'}): try again"
    return f"cannot be reached any more ({error.strerror or error}): try again"


def _peer_text(raw: socket.socket) -> str:
    with suppress(OSError):
        address = raw.getpeername()
        if raw.family in (socket.AF_INET, socket.AF_INET6):
            return address_and_port(*address[:2])
    return "the other end"
