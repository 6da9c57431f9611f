"""Truncated, oversized, slow and mutated handshakes: each is rejected in plain words, and nothing of it stays."""

from __future__ import annotations

import gc
import os
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.comm.secure.meeting import (
    DEADLINE_S,
    Change,
    Wire,
    accepting,
    dialling,
    meet,
    outcome,
    receive,
    received_after,
    tls_client,
    tls_server,
)
from thinpipe.comm.secure import handshake
from thinpipe.comm.secure.handshake import DESK, HandshakeError, accept, dial, judge, prove
from thinpipe.comm.secure.identity import Identity
from thinpipe.comm.secure.peers import KnownPeers
from thinpipe.comm.secure.ticket import Admission, Verdict
from thinpipe.system.sizes import status_bytes

GREETING = len(handshake._LABEL) + 32
PROOF = handshake._PROOF_BYTES
CLOSED = "the other end closed the connection during the handshake: look at its output"


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _no_descriptor_is_left(keys: list[Identity]) -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


def proving(sent: bytes) -> Callable[[socket.socket], bytes]:
    """Return a dialler that sends these bytes in place of a proof, and returns the answer."""

    def run(raw: socket.socket) -> bytes:
        with tls_client(raw) as channel:
            receive(channel, GREETING)
            channel.sendall(sent)
            return received_after(channel) if len(sent) >= PROOF else b""

    return run


def greeting(identity: Identity, sent: bytes, verdict: bytes = b"") -> Callable[[socket.socket], None]:
    """Return a listener that sends these bytes in place of a challenge, then these in place of a verdict."""

    def run(raw: socket.socket) -> None:
        with tls_server(raw, identity) as channel:
            channel.sendall(sent)
            if verdict:
                receive(channel, PROOF)
                channel.sendall(verdict)

    return run


def test_a_truncated_proof_is_a_closed_connection(keys: list[Identity], admission: Admission) -> None:
    proof = prove(keys[1], bytes(32), keys[0].public_key, DESK, None)
    for length in range(PROOF):
        rejected, _ = meet(accepting(keys[0], admission), proving(proof[:length]))
        assert str(rejected) == CLOSED, length


def test_a_truncated_challenge_or_verdict_is_a_closed_connection(keys: list[Identity]) -> None:
    sent = handshake._LABEL + bytes(32)
    for length in range(GREETING + 1):
        _, error = meet(greeting(keys[0], sent[:length]), dialling(keys[1], keys[0].fingerprint))
        assert (str(error), error.final) == (CLOSED, False), length


def test_oversized_messages_are_rejected_and_not_read(keys: list[Identity], admission: Admission) -> None:
    long = bytes(4 << 20)
    rejected, _ = meet(accepting(keys[0], admission), proving(long))
    assert "the proof of the key is not valid" in str(rejected)
    _, error = meet(greeting(keys[0], long), dialling(keys[1], keys[0].fingerprint))
    assert "has another version of the handshake: install the same version" in str(error)


@pytest.mark.parametrize("claimed", [0x4000, 0xFFFFFF])
def test_a_hello_that_claims_a_length_is_not_waited_for(keys: list[Identity], claimed: int) -> None:
    def call(raw: socket.socket) -> bytes:
        hello = b"\x01" + claimed.to_bytes(3, "big") + b"\x03\x03" + bytes(1000)
        raw.sendall(b"\x16\x03\x01" + len(hello).to_bytes(2, "big") + hello)
        raw.shutdown(socket.SHUT_WR)
        return received_after(raw)

    before = status_bytes("VmRSS")
    for _ in range(20):
        rejected, _ = meet(accepting(keys[0], bytes(32)), call)
        assert isinstance(rejected, HandshakeError)
    assert status_bytes("VmRSS") - before < 8 << 20  # half of what one of them claims


def test_an_unknown_verdict_is_final(keys: list[Identity]) -> None:
    sent = handshake._LABEL + bytes(32)
    for verdict in range(len(Verdict), 256, 50):
        _, error = meet(greeting(keys[0], sent, bytes([verdict])), dialling(keys[1], keys[0].fingerprint))
        assert str(error) == f"the other end answers {verdict}, which this version of thinpipe does not know"
        assert error.final


def dripping(data: bytes, stream: Callable[[socket.socket], socket.socket]) -> Callable[[socket.socket], list[int]]:
    """Return an end that sends byte after byte: no single read takes long, and all together take too long.

    It returns what it has sent when the other end closed the connection.
    """

    def run(raw: socket.socket) -> list[int]:
        sent: list[int] = []
        with stream(raw) as slow, suppress(OSError):
            for byte in data:
                time.sleep(0.02)
                slow.sendall(bytes([byte]))
                sent.append(byte)
        return sent

    return run


def test_one_deadline_holds_for_the_whole_handshake(keys: list[Identity]) -> None:
    listener, dialler, *_ = keys
    hello, label = client_hello() * 9, handshake._LABEL * 9

    def serving(raw: socket.socket) -> ssl.SSLSocket:
        return tls_server(raw, listener)

    for stream, data in ((lambda raw: raw, hello), (tls_client, label)):
        error, sent = meet(accepting(listener, bytes(32), 0.3), dripping(data, stream))
        assert "did not complete the handshake within 0.3 s" in str(error)
        assert len(sent) < PROOF
    for stream, data in ((lambda raw: raw, hello), (serving, label)):
        sent, error = meet(dripping(data, stream), dialling(dialler, listener.fingerprint, 0.3))
        assert "did not complete the handshake within 0.3 s" in str(error)
        assert len(sent) < PROOF
        assert not error.final
    error, _ = meet(accepting(listener, bytes(32), 0.0), lambda raw: None)
    assert "did not complete the handshake within 0 s" in str(error)


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def mutated(data: bytes, chance: random.Random, others: bytes = b"") -> bytes:
    """Return bytes with one to three changes, of any kind that changes them."""
    result = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(data))
        length = chance.choice((1, 1, 1, 2, 4, 32, 100))
        kind = chance.randrange(7)
        if kind == 0:
            result[start:start] = chance.randbytes(length)
        elif kind == 1:
            del result[start : start + length]
        elif kind == 2:
            result[start : start + length] = chance.randbytes(length)
        elif kind == 3 and start < len(result):
            result[start] ^= 1 << chance.randrange(8)
        elif kind == 4:
            result[start : start + length] = bytes([chance.choice((0, 255))]) * length
        elif kind == 5 and others:
            result[start : start + length] = others[start : start + length]
        else:
            result += chance.randbytes(length)
    return bytes(result)


def test_6000_mutated_proofs_admit_nobody(keys: list[Identity], admission: Admission, known: KnownPeers) -> None:
    """Each is a valid proof of a key and a secret but for its mutations; other valid proofs are mixed in."""
    listener, dialler, friend, *_ = keys
    known.remember(friend.fingerprint, "friend")
    before = known.path.read_bytes()
    secret, chance, challenge = admission.new_secret(10_000, 3600), random.Random(0), bytes(range(32))
    proof = prove(dialler, challenge, listener.public_key, DESK, secret)
    others = [
        prove(friend, bytes(32), listener.public_key, DESK, secret),  # of another connection
        prove(friend, challenge, dialler.public_key, DESK, secret),  # for another listener
        prove(friend, challenge, listener.public_key, b"r" * 16, secret),  # for another route
        prove(dialler, challenge, listener.public_key, DESK, bytes(16)),  # with another secret
    ]
    verdicts: Counter[Verdict] = Counter()
    for number in range(6000):
        wrong = mutated(proof, chance, others[number % 4])
        if wrong[:-32] == proof[:-32] and len(wrong) == len(proof) and wrong[-32:] == proof[-32:]:
            continue  # mutations that cancel each other out
        verdict, fingerprint = judge(wrong, challenge, listener, DESK, admission, "mutated")
        verdicts[verdict] += 1
        assert fingerprint in (b"", dialler.fingerprint)
        assert judge(wrong, challenge, listener, DESK, friend.fingerprint, "")[0] != Verdict.ADMITTED
    assert verdicts.keys() <= {Verdict.BAD_PROOF, Verdict.WRONG_SECRET, Verdict.UNKNOWN}
    assert verdicts.total() > 5900
    assert verdicts[Verdict.BAD_PROOF] > 3000 < 3000 + verdicts[Verdict.WRONG_SECRET]
    assert known.path.read_bytes() == before
    assert judge(proof, challenge, listener, DESK, admission, "right")[0] == Verdict.ADMITTED


def test_4000_mutated_hellos_are_rejected_and_nothing_grows(keys: list[Identity]) -> None:
    """Raw bytes of TLS: the first flight of a client at a listener, and that of a listener at a client."""
    listener, dialler, *_ = keys
    chance, flights = random.Random(1), {"dialler": client_hello(), "listener": b""}
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    incoming.write(flights["dialler"])
    with pytest.raises(ssl.SSLWantReadError):
        listener.server_context.wrap_bio(incoming, outgoing, server_side=True).do_handshake()
    flights["listener"] = outgoing.read()
    words: Counter[str] = Counter()

    def attack(sender: str) -> None:
        raw, other = socket.socketpair()
        with other:
            other.sendall(mutated(flights[sender], chance, flights["listener"]))
            other.shutdown(socket.SHUT_WR)
            if sender == "dialler":
                error = outcome(lambda: accept(raw, listener, bytes(32), deadline_s=DEADLINE_S))
            else:
                error = outcome(lambda: dial(raw, dialler, listener.fingerprint, deadline_s=DEADLINE_S))
        assert isinstance(error, HandshakeError)
        words[str(error).partition(" (")[0]] += 1

    for _ in range(400):  # OpenSSL's tables are filled
        attack("dialler")
        attack("listener")
    before = status_bytes("VmRSS")
    for _ in range(1600):
        attack("dialler")
        attack("listener")
    assert status_bytes("VmRSS") - before < 8 << 20
    assert words.total() == 4000
    assert {CLOSED, "the other end sent a damaged handshake"} <= words.keys()


def live(keys: list[Identity], change: Change, deadline_s: float) -> tuple[Any, Any, Wire]:
    """Return the outcomes of the listener and of the dialler over a wire that may change bytes; all is closed."""
    listener, dialler, *_ = keys
    wire, accepted = Wire(change), []

    def listen() -> None:
        accepted.append(outcome(lambda: accept(wire.listener, listener, dialler.fingerprint, deadline_s=deadline_s)))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    dialled = outcome(lambda: dial(wire.dialler, dialler, listener.fingerprint, deadline_s=deadline_s))
    thread.join(60)
    for end in (dialled, *(accepted[0] if isinstance(accepted[0], tuple) else ())):
        if isinstance(end, socket.socket):
            end.close()
    wire.join()
    return accepted[0], dialled, wire


def test_300_handshakes_with_a_bit_changed_on_the_wire_admit_nobody(keys: list[Identity]) -> None:
    accepted, dialled, wire = live(keys, lambda sender, position, data: data, DEADLINE_S)
    assert accepted[1] == keys[1].fingerprint
    assert isinstance(dialled, socket.socket)
    chance, lengths = random.Random(2), {sender: len(sent) for sender, sent in wire.sent.items()}
    for _ in range(300):
        sender = chance.choice(("listener", "dialler"))
        place, bit = chance.randrange(lengths[sender]), 1 << chance.randrange(8)

        def change(by: str, position: int, data: bytes, at: Any = (sender, place, bit)) -> bytes:
            index = at[1] - position
            if by != at[0] or not 0 <= index < len(data):
                return data
            return data[:index] + bytes([data[index] ^ at[2]]) + data[index + 1 :]

        # A changed length makes an end wait: that is what the deadline is for.
        assert isinstance(live(keys, change, deadline_s=0.5)[1], HandshakeError), (sender, place, bit)
