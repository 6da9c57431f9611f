"""The handshake admits whom it should, and rejects every attack with an error in plain words."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from tests.comm.secure.meeting import (
    Wire,
    accepting,
    dialling,
    meet,
    outcome,
    receive,
    received_after,
    tls_client,
    tls_server,
    with_certificate,
)
from thinpipe.comm.secure import handshake
from thinpipe.comm.secure.handshake import DESK, HandshakeError, accept, dial, judge, prove
from thinpipe.comm.secure.identity import Identity
from thinpipe.comm.secure.peers import KnownPeers
from thinpipe.comm.secure.ticket import Admission, Verdict

GREETING = len(handshake._LABEL) + 32
PROOF = handshake._PROOF_BYTES
ROUTE = b"a route, 16 long"


def secret_of(admission: Admission, uses: int = 1, seconds: float = 60) -> bytes:
    return admission.new_secret(uses, seconds)


def test_a_new_peer_is_admitted_by_a_ticket_and_later_by_its_key(
    keys: list[Identity], known: KnownPeers, admission: Admission
) -> None:
    listener, dialler, *_ = keys
    for secret in (secret_of(admission), None):
        (accepted, fingerprint), dialled = meet(
            accepting(listener, admission), dialling(dialler, listener.fingerprint, secret=secret)
        )
        assert fingerprint == dialler.fingerprint
        with accepted, dialled:
            assert accepted.version() == dialled.version() == "TLSv1.3"
            assert accepted.gettimeout() is dialled.gettimeout() is None
            dialled.sendall(b"question")
            assert receive(accepted, 8) == b"question"
            accepted.sendall(b"answer")
            assert receive(dialled, 6) == b"answer"
    assert list(known.names) == [dialler.fingerprint]


def test_what_follows_the_handshake_at_once_is_not_lost(keys: list[Identity]) -> None:
    listener, dialler, *_ = keys

    def accept_and_send(raw: socket.socket) -> Any:
        channel, _ = accept(raw, listener, dialler.fingerprint, deadline_s=20)
        channel.sendall(bytes(100_000) + b"end")
        return channel

    accepted, dialled = meet(accept_and_send, dialling(dialler, listener.fingerprint))
    with accepted, dialled:
        assert receive(dialled, 100_003).endswith(b"end")


def reject(keys: list[Identity], whom: Any, secret: bytes | None, dialler: int = 1) -> tuple[str, bool]:
    """Let a dialler be rejected; return what it is told, and whether that is final."""
    listener = keys[0]
    rejected, error = meet(accepting(listener, whom), dialling(keys[dialler], listener.fingerprint, secret=secret))
    assert isinstance(rejected, HandshakeError)
    assert isinstance(error, HandshakeError)
    return str(error), error.final


def test_unknown_keys_and_wrong_secrets_are_rejected_each_with_its_reason(
    keys: list[Identity], admission: Admission, known: KnownPeers
) -> None:
    told = {
        "unknown": reject(keys, admission, None),
        "wrong": reject(keys, admission, bytes(16)),
        "expired": reject(keys, admission, secret_of(admission, seconds=-1)),
        "exhausted": reject(keys, admission, secret_of(admission, uses=0)),
        "not allowed": reject(keys, restricted := Admission(known, {bytes(32)}), secret_of(restricted)),
        "unexpected": reject(keys, keys[2].fingerprint, None),
    }
    assert {name: (text.partition(": ")[2], final) for name, (text, final) in told.items()} == {
        "unknown": ("the key is unknown, and no ticket was given; use a new ticket", True),
        "wrong": ("the ticket is not one of this listener, or of an earlier start; use a new ticket", True),
        "expired": ("the ticket has expired; use a new ticket", True),
        "exhausted": ("the ticket has admitted as many new peers as it may; use a new ticket", True),
        "not allowed": ("its owner does not allow this key; give the owner the one that `thinpipe peers` shows", True),
        "unexpected": ("the key is not that of the worker expected on this connection", True),
    }
    assert known.names == {}


def test_the_listener_reports_which_key_it_rejected(keys: list[Identity], admission: Admission) -> None:
    rejected, _ = meet(accepting(keys[0], admission), dialling(keys[1], keys[0].fingerprint))
    text = handshake.fingerprint_text(keys[1].fingerprint)
    assert str(rejected).startswith(f"the other end (key {text}) was rejected: the key is unknown")


def test_a_damaged_list_of_peers_admits_nobody_and_the_dialler_may_try_again(
    keys: list[Identity], admission: Admission, known: KnownPeers
) -> None:
    secret = secret_of(admission)
    known.path.parent.mkdir()
    known.path.write_text("[]")
    rejected, error = meet(accepting(keys[0], admission), dialling(keys[1], keys[0].fingerprint, secret=secret))
    assert "peers.json cannot be read" in str(rejected)
    assert (error.final, str(error).partition(": ")[2]) == (
        False,
        "the listener failed to look up the key; look at its output",
    )


def test_a_listener_with_another_key_gets_no_byte(keys: list[Identity]) -> None:
    def listening_with(identity: Identity) -> Callable[[socket.socket], bytes]:
        def run(raw: socket.socket) -> bytes:
            with tls_server(raw, identity) as channel, suppress(OSError):  # the dialler may be gone
                channel.sendall(handshake._LABEL + bytes(32))  # invites a proof
                return receive(channel, PROOF)
            return b""

        return run

    received, error = meet(listening_with(keys[2]), dialling(keys[1], keys[0].fingerprint, secret=bytes(range(16))))
    assert received == b""
    assert error.final
    assert "another machine answers there, or its key was replaced" in str(error)
    received, _ = meet(listening_with(keys[0]), dialling(keys[1], keys[0].fingerprint, secret=bytes(range(16))))
    assert len(received) == PROOF
    assert bytes(range(16)) not in received  # the secret itself is never sent


def test_a_listener_with_another_kind_of_key_is_rejected(keys: list[Identity], tmp_path: Path) -> None:
    (tmp_path / "pem").write_bytes(with_certificate(generate_private_key(SECP256R1())))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pem")

    def impostor(raw: socket.socket) -> bytes:
        return received_after(context.wrap_socket(raw, server_side=True))

    received, error = meet(impostor, dialling(keys[1], keys[0].fingerprint))
    assert received == b""
    assert (error.final, str(error)) == (
        True,
        "the other end is not the expected machine: its certificate has no Ed25519 key",
    )


def stranger(sent: bytes) -> Any:
    """Return an end that sends bytes, then no more, and reads to the end."""

    def run(raw: socket.socket) -> bytes:
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        return received_after(raw)

    return run


NOT_TLS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x HTTP/1.1\r\n\r\n",
    b"SSH-2.0-OpenSSH_9\r\n",
    bytes(64),
    b"\xff" * 999,
)


@pytest.mark.parametrize("sent", [*NOT_TLS, b"\x16\x03\x01\xff\xff" + bytes(70_000)])
def test_what_is_no_tls_is_rejected_by_both_ends(keys: list[Identity], sent: bytes) -> None:
    listener = keys[0]
    for error in (
        meet(accepting(listener, bytes(32)), stranger(sent))[0],
        meet(stranger(sent), dialling(keys[1], listener.fingerprint))[1],
    ):
        assert str(error).startswith("the other end does not speak TLS, so it is not thinpipe")
        assert not error.final


def test_a_peer_that_closes_at_once_is_reported_as_that(keys: list[Identity]) -> None:
    listener = keys[0]
    for sent in (b"", b"\x16", b"\x16\x03\x01\x00\x80" + bytes(5)):
        for error in (
            meet(accepting(listener, bytes(32)), stranger(sent))[0],
            meet(stranger(sent), dialling(keys[1], listener.fingerprint))[1],
        ):
            assert str(error) == "the other end closed the connection during the handshake: look at its output"


def test_tls_1_2_is_rejected_by_both_ends(keys: list[Identity]) -> None:
    listener = keys[0]
    error, theirs = meet(accepting(listener, bytes(32)), lambda raw: tls_client(raw, ssl.TLSVersion.TLSv1_2))
    assert isinstance(theirs, ssl.SSLError)
    assert str(error) == (
        "the other end offers no TLS 1.3, which thinpipe requires: look at the address, or for a proxy in between"
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(listener.path)
    theirs, error = meet(
        lambda raw: context.wrap_socket(raw, server_side=True), dialling(keys[1], listener.fingerprint)
    )
    assert isinstance(theirs, ssl.SSLError)
    assert "offers no TLS 1.3" in str(error)


def test_a_recorded_proof_is_rejected_on_a_new_connection(
    keys: list[Identity], admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, dialler, *_ = keys
    proofs: list[bytes] = []

    def recorded(*arguments: Any) -> bytes:
        proofs.append(prove(*arguments))
        return proofs[-1]

    monkeypatch.setattr(handshake, "prove", recorded)
    (accepted, _), dialled = meet(
        accepting(listener, admission), dialling(dialler, listener.fingerprint, secret=secret_of(admission, uses=5))
    )
    accepted.close()
    dialled.close()

    def replay(raw: socket.socket) -> bytes:
        channel = tls_client(raw)
        receive(channel, GREETING)
        channel.sendall(proofs[0])
        return received_after(channel)

    rejected, answer = meet(accepting(listener, admission), replay)
    assert answer == bytes([Verdict.BAD_PROOF])
    assert "the proof of the key is not valid for this connection" in str(rejected)


def test_recorded_bytes_of_a_connection_are_rejected(keys: list[Identity]) -> None:
    listener, dialler, *_ = keys
    wire = Wire()
    thread = threading.Thread(
        target=lambda: accept(wire.listener, listener, dialler.fingerprint, deadline_s=20)[0].close(), daemon=True
    )
    thread.start()
    dial(wire.dialler, dialler, listener.fingerprint, deadline_s=20).close()
    thread.join(20)
    wire.join()
    recorded = wire.sent["dialler"]
    assert len(recorded) > PROOF
    for cut in (*range(1, len(recorded), 97), len(recorded)):
        rejected, _ = meet(accepting(listener, dialler.fingerprint), stranger(recorded[:cut]))
        assert isinstance(rejected, HandshakeError), cut


def test_nothing_that_identifies_a_machine_is_readable_on_the_wire(keys: list[Identity], admission: Admission) -> None:
    listener, dialler, *_ = keys
    secret, wire = secret_of(admission), Wire()
    thread = threading.Thread(
        target=lambda: accept(wire.listener, listener, admission, deadline_s=20)[0].close(), daemon=True
    )
    thread.start()
    dial(wire.dialler, dialler, listener.fingerprint, secret=secret, deadline_s=20).close()
    thread.join(20)
    wire.join()
    sent = b"".join(wire.sent.values())
    for part in (b"thinpipe", secret, *(value for key in keys[:2] for value in (key.public_key, key.fingerprint))):
        assert part not in sent


def test_the_proof_of_a_secret_is_worth_nothing_with_another_key_or_on_another_connection(
    keys: list[Identity], admission: Admission
) -> None:
    """Somebody who has recorded the proof of a secret has not the secret: the HMAC fits nothing but its connection."""
    listener, dialler, other, *_ = keys
    secret, challenge = secret_of(admission), bytes(range(32))

    def verdict(mac_of: Identity, *arguments: Any) -> Verdict:
        mac = prove(mac_of, *arguments, secret)[-32:]
        proof = prove(dialler, challenge, listener.public_key, ROUTE, None)[:-32] + mac
        return judge(proof, challenge, listener, ROUTE, admission, "")[0]

    for recorded in (
        (other, challenge, listener.public_key, ROUTE),
        (dialler, bytes(32), listener.public_key, ROUTE),
        (dialler, challenge, other.public_key, ROUTE),
        (dialler, challenge, listener.public_key, DESK),
    ):
        assert verdict(*recorded) == Verdict.WRONG_SECRET
    assert verdict(dialler, challenge, listener.public_key, ROUTE) == Verdict.ADMITTED


def test_a_proof_for_one_listener_is_worth_nothing_at_another(
    keys: list[Identity], known: KnownPeers, admission: Admission
) -> None:
    """An attacker whom a machine dials passes its proof on to another listener, which knows that machine."""
    listener, victim, attacker, *_ = keys
    known.remember(victim.fingerprint, "victim")
    wire, answers = socket.socketpair(), []

    def relay(raw: socket.socket) -> None:
        inner = tls_client(raw)
        outer = tls_server(wire[0], attacker)
        outer.sendall(receive(inner, GREETING))
        inner.sendall(receive(outer, PROOF))
        answers.append(received_after(inner))
        outer.close()

    thread = threading.Thread(
        target=lambda: outcome(lambda: dial(wire[1], victim, attacker.fingerprint, deadline_s=20)), daemon=True
    )
    thread.start()
    rejected, _ = meet(accepting(listener, admission), relay)
    thread.join(20)
    assert answers == [bytes([Verdict.BAD_PROOF])]
    assert isinstance(rejected, HandshakeError)


def test_exchanged_routes_are_found_out(keys: list[Identity]) -> None:
    listener, dialler, *_ = keys
    rejected, error = meet(
        accepting(listener, dialler.fingerprint, route=ROUTE), dialling(dialler, listener.fingerprint, route=DESK)
    )
    assert "not valid for this connection" in str(rejected)
    assert "not valid for this connection" in str(error)
    (accepted, _), dialled = meet(
        accepting(listener, dialler.fingerprint, route=ROUTE), dialling(dialler, listener.fingerprint, route=ROUTE)
    )
    accepted.close()
    dialled.close()
