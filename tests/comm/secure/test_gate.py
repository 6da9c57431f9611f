"""The gate passes connections on by their routes, and neither slow nor many strangers keep a peer out."""

from __future__ import annotations

import errno
import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from tests.comm.secure.meeting import DEADLINE_S, receive
from thinpipe.comm import acceptor
from thinpipe.comm.acceptor import oldest_of_most_frequent, source_of
from thinpipe.comm.secure import gate as module
from thinpipe.comm.secure.gate import DESK, ROUTE_BYTES, Gate
from thinpipe.comm.secure.handshake import HandshakeError, accept, connect, dial
from thinpipe.comm.secure.identity import Identity
from thinpipe.comm.secure.ticket import Admission
from thinpipe.system.sizes import status_bytes

LOOPBACK = "127.0.0.1"
ROUTE = bytes(range(ROUTE_BYTES))
Handle = Callable[[bytes, socket.socket], bool]


@contextmanager
def gate(handle: Handle, lines: list[str] | None = None) -> Iterator[int]:
    """Yield the port of a gate."""
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    opened = Gate(listener, handle, [].append if lines is None else lines.append)
    opened.start()
    try:
        yield listener.getsockname()[1]
    finally:
        opened.close()


def stranger(port: int, sent: bytes = b"", source: str = LOOPBACK) -> socket.socket:
    connection = socket.create_connection((LOOPBACK, port), DEADLINE_S, source_address=(source, 0))
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Wait until the gate closes a connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def desk(identity: Identity, admission: Admission) -> Handle:
    """Return a handler that admits peers and greets them."""

    def handle(route: bytes, raw: socket.socket) -> bool:
        channel, _ = accept(raw, identity, admission, deadline_s=DEADLINE_S)
        with channel:
            channel.sendall(b"welcome")
        return True

    return handle


def visit(port: int, keys: list[Identity], secret: bytes | None = None) -> bytes:
    """Return what a legitimate peer gets."""
    raw = connect(LOOPBACK, port, DESK, timeout_s=DEADLINE_S)
    with dial(raw, keys[1], keys[0].fingerprint, secret=secret, deadline_s=DEADLINE_S) as channel:
        return receive(channel, 7)


def test_a_connection_arrives_with_its_route_and_nothing_of_it_is_lost() -> None:
    found: list[tuple[bytes, socket.socket]] = []
    arrived = threading.Semaphore(0)

    def handle(route: bytes, raw: socket.socket) -> bool:
        found.append((route, raw))
        arrived.release()
        return True

    with gate(handle) as port, stranger(port, ROUTE[:5]) as slow, stranger(port, DESK + b"the rest") as fast:
        assert arrived.acquire(timeout=DEADLINE_S)
        slow.sendall(ROUTE[5:] + b"more")
        assert arrived.acquire(timeout=DEADLINE_S)
        (first, one), (second, two) = found
        with one, two:
            assert (first, receive(one, 8)) == (DESK, b"the rest")
            assert (second, receive(two, 4)) == (ROUTE, b"more")
            assert one.gettimeout() is None
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            one.sendall(b"answer")
            assert receive(fast, 6) == b"answer"


def test_an_unknown_route_and_a_handler_that_fails_close_the_connection_and_the_gate_goes_on(
    keys: list[Identity], admission: Admission
) -> None:
    lines: list[str] = []
    welcome = desk(keys[0], admission)

    def handle(route: bytes, raw: socket.socket) -> bool:
        if route == DESK:
            return welcome(route, raw)
        if route == ROUTE:
            raise ZeroDivisionError("a bug")
        return False

    with gate(handle, lines) as port:
        for route in (ROUTE, ROUTE[::-1]):
            with stranger(port, route) as connection:
                assert is_closed(connection)
        with pytest.raises(HandshakeError, match="the key is unknown"):
            visit(port, keys)
        assert visit(port, keys, admission.new_secret(1, 60)) == b"welcome"
    assert lines[0] == "127.0.0.1: ZeroDivisionError: a bug"
    assert "was rejected: the key is unknown" in lines[1]
    assert len(lines) == 2


def test_errors_of_a_flood_are_counted_and_not_reported_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    with socket.create_server((LOOPBACK, 0)) as listener:
        guarded = Gate(listener, lambda *_: False, lines.append)
        for now in (*range(40), 100):
            monkeypatch.setattr(time, "monotonic", lambda now=now: float(now))
            guarded._note("a stranger")
        monkeypatch.undo()
        guarded.close()
    assert lines == ["a stranger"] * 5 + ["a stranger (and 35 more before that were not reported)"]


def test_a_connection_without_a_complete_route_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROUTE_S", 0.2)
    with gate(lambda *_: pytest.fail("a route was incomplete")) as port:
        with stranger(port) as silent, stranger(port, ROUTE[:15]) as short:
            assert is_closed(silent)
            assert is_closed(short)
        with stranger(port, ROUTE[:3]) as ended:
            ended.shutdown(socket.SHUT_WR)
            assert is_closed(ended)


def flood(port: int, count: int, sent: bytes, stack: ExitStack, source: str = LOOPBACK) -> None:
    """Open connections that send this and then nothing; they stay open until the stack ends."""
    for _ in range(count):
        with suppress(ConnectionError):  # closed by the gate before it has sent
            stack.enter_context(stranger(port, sent, source))


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_1000_slow_connections_keep_nobody_out_and_leave_nothing(keys: list[Identity], admission: Admission) -> None:
    """Silent, with half a route, with a route and no TLS, with half a TLS message: 250 each, all at the same time."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    before = descriptors()
    with gate(desk(keys[0], admission)) as port:
        assert visit(port, keys, admission.new_secret(1, 60)) == b"welcome"
        idle, memory = descriptors(), 0
        for attempt in range(3):
            with ExitStack() as strangers:
                for sent in (b"", ROUTE[:7], DESK, DESK + hello):
                    flood(port, 250, sent, strangers)
                    assert visit(port, keys) == b"welcome"
                # Theirs, and those of the gate: pending, in handlers with their duplicates.
                assert descriptors() - idle < 1000 + acceptor._MOST_PENDING + 4 * module._MOST_HANDLED
                assert threading.active_count() < 3 * module._MOST_HANDLED
            if attempt == 0:
                memory = status_bytes("VmRSS")  # stacks of threads, tables of OpenSSL
        assert visit(port, keys) == b"welcome"
        assert status_bytes("VmRSS") - memory < 4 << 20
    wait_for(lambda: descriptors() == before)


def wait_for(condition: Callable[[], bool]) -> None:
    """Return when a condition holds; the time limit of the test ends it otherwise."""
    tick = threading.Event()
    while not condition():
        tick.wait(0.02)


def test_a_flood_from_one_address_displaces_itself_and_not_a_peer_from_another(
    keys: list[Identity], admission: Admission
) -> None:
    """The peer is slower than the flood, with its route and with its handshake."""
    admission_secret = admission.new_secret(1, 60)
    with gate(desk(keys[0], admission)) as port, ExitStack() as strangers:
        raw = stranger(port, DESK[:1], source="127.0.0.2")
        flood(port, 300, ROUTE[:1], strangers)
        raw.sendall(DESK[1:])
        flood(port, 300, DESK, strangers)
        with dial(raw, keys[1], keys[0].fingerprint, secret=admission_secret, deadline_s=DEADLINE_S) as channel:
            assert receive(channel, 7) == b"welcome"


def test_handlers_that_do_not_end_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_HANDLED", 4)
    started, ended, release = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def handle(route: bytes, raw: socket.socket) -> bool:
        started.release()
        release.wait(DEADLINE_S)
        ended.release()
        return False

    with gate(handle) as port, ExitStack() as strangers:
        for _ in range(8):
            strangers.enter_context(stranger(port, DESK))
            assert started.acquire(timeout=DEADLINE_S)
        for _ in range(20):
            with stranger(port, DESK) as excess:
                assert is_closed(excess)
        assert not started.acquire(blocking=False)
        release.set()
        for _ in range(8):
            assert ended.acquire(timeout=DEADLINE_S)
        wait_for(lambda: not [each for each in threading.enumerate() if "handle" in repr(each)])
        strangers.enter_context(stranger(port, DESK))
        assert started.acquire(timeout=DEADLINE_S)


def test_without_descriptors_the_gate_waits_and_goes_on(
    keys: list[Identity], admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, taken = threading.Semaphore(0), list[int]()
    sleep = acceptor.time.sleep

    def pause(seconds: float) -> None:
        paused.release()
        sleep(seconds)

    monkeypatch.setattr(acceptor.time, "sleep", pause)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    listener = socket.create_server((LOOPBACK, 0), backlog=256)
    port = listener.getsockname()[1]
    with ExitStack() as strangers:
        opened = Gate(listener, desk(keys[0], admission))
        strangers.callback(opened.close)
        flood(port, 100, b"", strangers)  # they wait in the kernel
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
        try:
            with suppress(OSError):  # until none is left
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(3):
                os.close(taken.pop())
            opened.start()
            for _ in range(3):
                assert paused.acquire(timeout=DEADLINE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for each in taken:
                os.close(each)
        assert visit(port, keys, admission.new_secret(1, 60)) == b"welcome"


class Exhausted(socket.socket):
    """A listening socket for which there is never a descriptor."""

    tried = 0

    def accept(self) -> Any:
        self.tried += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_without_descriptors_every_attempt_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(acceptor.time, "sleep", pauses.append)
    with (
        Exhausted(fileno=socket.create_server((LOOPBACK, 0)).detach()) as listener,
        stranger(listener.getsockname()[1]),
    ):
        waiting = acceptor.Acceptor(listener, lambda first: True, 1, 60)
        for _ in range(5):
            assert waiting.poll() == []
        waiting.close()
        assert len(pauses) == listener.tried == 5
        assert min(pauses) > 0


def test_a_closed_gate_has_no_socket_and_ends_its_handlers() -> None:
    ended = threading.Event()

    def handle(route: bytes, raw: socket.socket) -> bool:
        with raw:
            raw.recv(1)
        ended.set()
        return True

    before = descriptors()
    with ExitStack() as strangers:
        with gate(handle) as port:
            pending, handled = (strangers.enter_context(stranger(port, sent)) for sent in (ROUTE[:3], ROUTE))
            wait_for(lambda: descriptors() == before + 2 + 2 + 1 + 2)  # the gate, ours, pending, handled
        assert ended.wait(DEADLINE_S)
        assert is_closed(pending)
        assert is_closed(handled)
        with pytest.raises(ConnectionRefusedError):
            stranger(port)
    wait_for(lambda: descriptors() == before)


@pytest.mark.parametrize(
    ("address", "source"),
    [
        (("192.0.2.7", 4000), "192.0.2.7"),
        (("2001:db8:0:1:2:3:4:5", 4000, 0, 0), "2001:db8:0:1::/64"),
        (("fe80::1%lo", 4000, 0, 1), "fe80::/64"),
        (("::ffff:192.0.2.7", 4000, 0, 0), "::ffff:192.0.2.7"),
        ("", ""),
    ],
)
def test_the_source_of_an_ipv6_connection_is_its_network(address: Any, source: str) -> None:
    assert source_of(address) == source


def test_the_oldest_of_the_source_with_the_most_is_chosen() -> None:
    assert oldest_of_most_frequent(["a", "b", "c", "b", "a", "b"]) == 1
    assert oldest_of_most_frequent(["a", "b", "c"]) == 0
