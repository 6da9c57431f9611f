"""The relay of two servers: bytes in both directions, half-closed connections, back-pressure, and new legs."""

from __future__ import annotations

import socket
import threading

import pytest

from thinpipe.train.serve.relay import Relay, splice


def spliced() -> tuple[socket.socket, socket.socket, threading.Thread]:
    (one, end), (other, other_end) = socket.socketpair(), socket.socketpair()
    thread = threading.Thread(target=splice, args=(end, other_end))
    thread.start()
    for each in (one, other):
        each.settimeout(20)
    return one, other, thread


def receive_all(source: socket.socket) -> bytes:
    parts = []
    while part := source.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_bytes_pass_in_both_directions_and_a_closed_one_leaves_the_other_open() -> None:
    one, other, thread = spliced()
    data = bytes(range(256)) * 20_000
    sender = threading.Thread(target=lambda: (one.sendall(data), one.shutdown(socket.SHUT_WR)))
    sender.start()
    assert receive_all(other) == data
    other.sendall(b"still here")
    other.shutdown(socket.SHUT_WR)
    assert receive_all(one) == b"still here"
    sender.join(20)
    thread.join(20)
    assert not thread.is_alive()


def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    one, other, thread = spliced()
    one.settimeout(0.5)
    with pytest.raises(TimeoutError):
        one.sendall(bytes(8 << 20))  # more than sockets and one buffer hold
    one.close()
    other.close()
    thread.join(20)
    assert not thread.is_alive()


def test_legs_are_spliced_when_both_are_there_and_again_after_one_has_broken() -> None:
    relay = Relay((1, 2), None)
    relay.start()
    for _ in range(3):
        pairs = {worker: socket.socketpair() for worker in (1, 2)}
        for worker, (_, leg) in pairs.items():
            relay.attach(worker, leg)
        (first, _), (second, _) = pairs.values()
        first.settimeout(20)
        second.settimeout(20)
        first.sendall(b"hello")
        assert second.recv(5) == b"hello"
        # A server connects again: the other's leg ends, so that it does, too.
        again, leg = socket.socketpair()
        relay.attach(1, leg)
        assert second.recv(1) == b""
        again.close()
    relay.close()


def test_a_client_that_dials_makes_both_legs_again_when_one_breaks() -> None:
    made: dict[int, list[socket.socket]] = {1: [], 2: []}
    changed = threading.Condition()

    def dial(worker: int) -> socket.socket:
        mine, theirs = socket.socketpair()
        theirs.settimeout(20)
        with changed:
            made[worker].append(theirs)
            changed.notify_all()
        return mine

    relay = Relay((1, 2), dial)
    relay.start()
    for attempt in range(2):
        with changed:
            assert changed.wait_for(lambda least=attempt: all(len(each) > least for each in made.values()), 20)
        made[2][attempt].sendall(b"hello")
        assert made[1][attempt].recv(5) == b"hello"
        made[1][attempt].close()
        assert made[2][attempt].recv(1) == b""
        made[2][attempt].close()
    relay.close()
