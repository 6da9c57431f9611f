"""Channels: messages over connections that are cut, die silently or are replaced; errors that name the peer."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.comm.secure.network import Encrypt, Nat, plain, throwaway_tls, two_meshes
from tests.comm.secure.test_frames import frame_of
from thinpipe.comm.errors import LinkError
from thinpipe.comm.secure import channel, frames
from thinpipe.comm.secure.channel import Channel
from thinpipe.comm.secure.mesh import Mesh

LIMIT_S = 60.0


@pytest.fixture(params=["plain", "tls"])
def encrypt(request: pytest.FixtureRequest, tmp_path: Path) -> Encrypt:
    return plain if request.param == "plain" else throwaway_tls(tmp_path)


def receive(end: Channel, tag: int, size: int) -> Callable[[], bytes]:
    memory = bytearray(size)
    operation = end.receive(0, tag, memoryview(memory))

    def wait() -> bytes:
        assert operation.wait(LIMIT_S)
        assert operation.error is None
        return bytes(memory[: operation.at])

    return wait


def send(end: Channel, tag: int, data: bytes) -> None:
    operation = end.send(0, tag, memoryview(data))
    assert operation.wait(LIMIT_S)
    assert operation.error is None


def test_messages_of_any_length(encrypt: Encrypt) -> None:
    rng = random.Random(0)
    sent = [rng.randbytes(size) for size in (0, 1, 1000, 1 << 14, 1 << 18, (1 << 18) + 1, 5_000_000)]
    with two_meshes(encrypt) as (meshes, _):
        one, two = meshes[0].channel(1), meshes[1].channel(0)
        for data in sent:
            late = threading.Thread(target=send, args=(one, 1, data))
            late.start()
            assert receive(two, 1, len(data))() == data
            early = receive(one, 2, len(data) + 5)
            send(two, 2, data)
            assert early() == data
            late.join()


def test_both_directions_at_once_in_other_orders(encrypt: Encrypt) -> None:
    rng = random.Random(1)
    data = {tag: rng.randbytes(rng.choice((10, 100_000, 3_000_000))) for tag in range(12)}
    with two_meshes(encrypt) as (meshes, _):
        ends = meshes[0].channel(1), meshes[1].channel(0)
        sends = [end.send(0, tag, memoryview(data[tag])) for tag in data for end in ends]
        waits = [(tag, receive(end, tag, len(data[tag]))) for tag in reversed(data) for end in ends]
        assert all(wait() == data[tag] for tag, wait in waits)
        assert all(each.wait(LIMIT_S) for each in sends)


def test_more_than_the_window_without_a_receive() -> None:
    """80 MB wait for their receives; the message that is wanted first is the last one."""
    data = [bytes([tag]) * (10 << 20) for tag in range(8)]
    with two_meshes(plain) as (meshes, _):
        one, two = meshes[0].channel(1), meshes[1].channel(0)
        sends = [one.send(0, tag, memoryview(each)) for tag, each in enumerate(data)]
        for tag in reversed(range(8)):
            assert receive(two, tag, 10 << 20)() == data[tag]
        assert all(each.wait(LIMIT_S) for each in sends)


def test_200_cuts(encrypt: Encrypt) -> None:
    """The network is cut at seeded moments of a ping-pong with messages of all sizes, both ways at once."""
    rng = random.Random(2)
    with two_meshes(encrypt) as (meshes, listener):
        ends = meshes[0].channel(1), meshes[1].channel(0)
        while len(listener.raw) <= 200:
            data = [rng.randbytes(rng.choice((0, 100, 50_000, 1_000_000))) for _ in range(6)]
            posted = rng.random() < 0.5
            waits = [receive(end, tag, 1_000_000) for tag in range(6) for end in ends] if posted else []
            sends = [end.send(0, tag, memoryview(data[tag])) for tag in range(6) for end in ends]
            for _ in range(rng.randint(1, 3)):
                time.sleep(rng.choice((0, 0.001, 0.01)))
                listener.cut()
            waits = waits or [receive(end, tag, 1_000_000) for tag in range(6) for end in ends]
            assert [wait() for wait in waits] == [data[tag] for tag in range(6) for _ in ends]
            assert all(each.wait(LIMIT_S) and each.error is None for each in sends)


@pytest.mark.parametrize("greeted", [False, True], ids=["in its greeting", "later"])
def test_a_silent_connection_is_replaced(monkeypatch: pytest.MonkeyPatch, greeted: bool) -> None:
    """Behind a NAT that has forgotten the connection nothing arrives, and no error either."""
    monkeypatch.setattr(channel, "SILENCE_S", 0.5)
    monkeypatch.setattr(channel, "GREETING_S", 0.5)
    monkeypatch.setattr(channel, "TICK_S", 0.1)
    with two_meshes(plain) as (meshes, listener):
        one, two, nat = meshes[0].channel(1), meshes[1].channel(0), Nat()
        nat.forgotten = not greeted
        one.attach(nat.outside)
        two.attach(nat.inside)
        if greeted:
            wait = receive(two, 0, 10)
            send(one, 0, b"first")
            assert wait() == b"first"
        nat.forgotten = True
        wait = receive(two, 0, 10)
        send(one, 0, b"second")
        assert wait() == b"second"
        assert len(listener.raw) > 1  # worker 1 has connected again
        nat.close()


def channel_without_thread(**options: object) -> Channel:
    lines: list[str] = []
    made = Channel(3, None, patience_s=20, report=lines.append)
    made.session.connect()
    made.__dict__.update(options)
    made.__dict__["lines"] = lines
    return made


def test_silence_counts_from_the_last_byte() -> None:
    made = channel_without_thread()
    made.session.resumed = True
    made._tick(0.9)
    assert made.session._ping is None
    made._tick(0.2)
    assert made.session._ping is not None
    while made._silent_s + 0.5 <= channel.SILENCE_S:
        made._tick(0.5)
    with pytest.raises(ConnectionError, match="nothing has arrived for 5 s"):
        made._tick(0.5)
    made._silent_s, made._round_trip_s = 0.0, 2.0  # a busy link: packets wait in its queues for seconds
    for _ in range(8):
        made._tick(0.99)
    with pytest.raises(ConnectionError, match="nothing has arrived for 9 s"):
        made._tick(0.99)
    made.close(0)


def test_a_pair_is_lost_after_the_patience() -> None:
    made = channel_without_thread()
    made._count_lost(1.9)
    assert made.lines == []
    made._count_lost(0.2)
    made._count_lost(1)
    assert made.lines == ["no connection to worker 3 (it has not connected yet), trying for 20 s"]
    made.session.resumed = True
    made._tick(0.1)
    assert made.lines[1:] == ["connected to worker 3 again after 3 s"]
    waiting = made.receive(0, 0, memoryview(bytearray(1)))
    made._count_lost(20)
    assert made._obtain() is None
    assert waiting.error == "worker 3 is gone: no connection for 20 s (it has not connected yet)"
    made._end()
    assert made.control.recv(1000) == b'\n{"end": ' + json.dumps(waiting.error).encode() + b"}\n"
    assert made.control.recv(1000) == b""
    made.control.close()


def test_nobody_connects() -> None:
    mesh = Mesh(0, 3, patience_s=0.2, report=lambda line: None)
    for peer in (1, 2):
        mesh.pair(peer, None)
    with pytest.raises(LinkError, match="worker 1 is gone: no connection for 0 s"):
        mesh.start()
    mesh.close()


def test_connections_that_are_closed_at_once() -> None:
    """Attempts have pauses between them, and end after the patience."""
    attempts = []

    def connect() -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.close()
        attempts.append(1)
        return ours

    mesh = Mesh(1, 2, patience_s=1, report=lambda line: None)
    mesh.pair(0, connect)  # type: ignore[arg-type]
    with pytest.raises(LinkError, match=r"worker 0 is gone: no connection for . s \(.*(closed|broken pipe|reset)"):
        mesh.start()
    assert 2 < len(attempts) < 10
    mesh.close()


def test_a_signal_during_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written bytes are not written again on the same connection."""
    with two_meshes(plain) as (meshes, listener):
        one, two = meshes[0].channel(1), meshes[1].channel(0)
        write, calls = one._write, []

        def interrupted(connection: socket.socket, batches: int) -> bool:
            done = write(connection, batches)
            if batches == 1 and not calls:
                calls.append(1)
                raise KeyboardInterrupt
            return done

        monkeypatch.setattr(one, "_write", interrupted)
        while not calls:
            with suppress(KeyboardInterrupt):
                one.send(0, 0, memoryview(b"first"))
        send(one, 1, b"second")
        assert receive(two, 0, 10)() == b"first"
        assert receive(two, 1, 10)() == b"second"
        assert len(listener.raw) == 2


class FinalError(ConnectionError):
    final = True


def test_a_final_error_is_not_repeated() -> None:
    attempts = []

    def connect() -> socket.socket:
        attempts.append(1)
        raise FinalError("wrong key") if len(attempts) == 3 else OSError("no route")

    mesh = Mesh(1, 2, patience_s=60, report=lambda line: None)
    mesh.pair(0, connect)  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="worker 0 cannot be connected: FinalError: wrong key"):
        mesh.start()
    assert len(attempts) == 3
    mesh.close()


def test_a_hostile_peer_is_named() -> None:
    ours, theirs = socket.socketpair()
    mesh = Mesh(0, 2, patience_s=60, report=lambda line: None)
    mesh.pair(1, None)
    mesh.attach(1, ours)  # type: ignore[arg-type]
    hello = json.dumps({"protocol": 1, "session": "0" * 32, "peer": ""}).encode()
    frame = bytearray(frame_of(frames.HELLO, hello))
    frame[32:40] = bytes(8)
    theirs.sendall(frame)
    mesh.start()
    waiting = mesh.channel(1).receive(0, 0, memoryview(bytearray(5)))
    theirs.sendall(b"GET / HTTP/1.1\r\n" * 10)
    assert waiting.wait(LIMIT_S)
    assert waiting.error == "worker 1 does not follow the protocol: kind 71 of a frame is unknown"
    assert mesh.control_sockets()[1].recv(1000).endswith(b'kind 71 of a frame is unknown"}\n')
    assert mesh.channel(1).send(0, 0, memoryview(b"a")).error == waiting.error
    late, other = socket.socketpair()
    mesh.attach(1, late)  # type: ignore[arg-type]
    assert other.recv(1) == b""  # closed
    mesh.close()
    for each in (theirs, other, *mesh.control_sockets().values()):
        each.close()


def test_a_receive_that_is_too_short() -> None:
    with two_meshes(plain) as (meshes, _):
        send(meshes[0].channel(1), 0, b"abc")
        receive_end = receive(meshes[1].channel(0), 1, 1)
        send(meshes[0].channel(1), 1, b"x")
        assert receive_end() == b"x"  # so the first message has arrived, too
        operation = meshes[1].channel(0).receive(0, 0, memoryview(bytearray(2)))
        assert operation.error is not None
        assert operation.error.endswith("a message of 3 bytes arrives for a receive of 2")


def test_the_control_channel_travels_inside(encrypt: Encrypt) -> None:
    with two_meshes(encrypt) as (meshes, listener):
        mine, theirs = meshes[0].control_sockets()[1], meshes[1].control_sockets()[0]
        theirs.settimeout(LIMIT_S)
        line = b'{"step": 1}\n'
        for _ in range(20):
            listener.cut()
            mine.sendall(line)
            assert theirs.recv(len(line), socket.MSG_WAITALL) == line
        mine.sendall(b'{"bye": true}\n')
        mine.close()
        assert theirs.recv(100) == b'{"bye": true}\n'
        meshes[0].close()
        assert theirs.recv(100) == b""  # without a cause


def test_what_was_sent_arrives_after_the_sender_has_left(encrypt: Encrypt) -> None:
    with two_meshes(encrypt) as (meshes, listener):
        one, two = meshes[0].channel(1), meshes[1].channel(0)
        meshes[0].control_sockets()[1].sendall(b'{"end": "cause"}\n')
        for tag in range(5):
            send(one, tag, bytes([tag]) * 100_000)
        listener.cut()
        meshes[0].close()
        assert [receive(two, tag, 100_000)()[:1] for tag in range(5)] == [bytes([tag]) for tag in range(5)]
        assert meshes[1].control_sockets()[0].recv(100) == b'{"end": "cause"}\n'
        assert two.receive(0, 9, memoryview(bytearray(1))).error == "worker 0 has ended its part of the run"


def test_nothing_is_left_behind(encrypt: Encrypt) -> None:
    def counted() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = counted()
    for _ in range(3):
        with two_meshes(encrypt) as (meshes, listener):
            listener.cut()
            wait = receive(meshes[0].channel(1), 0, 9)
            send(meshes[1].channel(0), 0, b"a")
            assert wait() == b"a"
    for _ in range(100):
        if counted() == before:
            break
        time.sleep(0.05)
    assert counted() == before


def test_a_second_connection_replaces_the_first() -> None:
    with two_meshes(plain) as (meshes, _):
        one, two = socket.socketpair()
        meshes[0].channel(1).attach(one)
        meshes[1].channel(0).attach(two)
        wait = receive(meshes[0].channel(1), 0, 9)
        send(meshes[1].channel(0), 0, b"a")
        assert wait() == b"a"
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
