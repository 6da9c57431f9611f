"""The control channel: silent workers are reported, then the run is aborted; every worker receives the first cause."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from thinpipe.comm import control
from thinpipe.comm.control import ACTIVITY, Activity, Control
from thinpipe.comm.errors import LinkError

TICK_S, WARN_S, GRACE_S, LATE_S, PATIENCE_S = 0.05, 0.2, 0.3, 0.5, 1.0
BEAT = {"step": 40, "doing": "stage 1 forward", "waiting": False, "done": 1, "cpu_s": 1.0}


class Worker:
    """A worker with a control channel of its own, and what came of it."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], patience_s: float = PATIENCE_S) -> None:
        self.lines: list[str] = []
        self.causes: list[str] = []
        self.ended = threading.Event()
        self.control = Control(rank, connections, patience_s=patience_s, report=self.lines.append, end=self.end)

    def end(self, cause: str) -> None:
        self.causes.append(cause)
        self.ended.set()
        self.control._closed.set()  # the thread of a process that has ended


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("TICK_S", TICK_S), ("WARN_S", WARN_S), ("GRACE_S", GRACE_S), ("LATE_S", LATE_S)):
        monkeypatch.setattr(control, name, value)
    yield
    ACTIVITY.waiting = False


def until(true: Callable[[], object], limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def test_a_silent_worker_is_named_and_then_given_up() -> None:
    mine, theirs = socket.socketpair()
    client = Worker(0, {1: mine})
    theirs.sendall(json.dumps(BEAT).encode() + b"\n")
    until(client.ended.is_set)
    assert client.lines[0].startswith("waiting for worker 1, silent for")
    assert "(last: step 40, stage 1 forward)" in client.lines[0]
    assert client.causes[0].startswith("worker 1 has been silent for")
    assert "end" in json.loads(theirs.recv(1 << 16).splitlines()[-1])  # sent to it as well, should it come back


def test_one_that_comes_back_is_welcome() -> None:
    mine, theirs = socket.socketpair()
    client = Worker(0, {1: mine}, patience_s=60)
    until(lambda: client.lines)
    theirs.sendall(json.dumps(BEAT).encode() + b"\n")
    until(lambda: len(client.lines) > 1)
    assert client.lines[1].startswith("worker 1 is back after")
    assert not client.ended.is_set()
    client.control.close()


def test_time_in_which_this_process_stood_still_is_nobodys_silence() -> None:
    mine, _theirs = socket.socketpair()
    client = Worker(0, {1: mine}, patience_s=60)
    peer = client.control._peers[1]
    client.control._count_silence(1, peer, 0.0)
    before = peer.silent_s
    client.control._tick(min(3600.0, 2 * TICK_S))
    assert peer.silent_s - before < 10 * TICK_S
    client.control.close()


def test_all_that_wait_for_each_other_are_ended() -> None:
    mine, theirs = socket.socketpair()
    client, server = Worker(0, {1: mine}), Worker(1, {0: theirs}, patience_s=60)
    ACTIVITY.waiting = True  # of both: they share this process
    until(client.ended.is_set)
    assert "all workers have waited for each other" in client.causes[0]
    until(server.ended.is_set)
    assert server.causes == client.causes


def test_a_worker_that_computes_is_waited_for() -> None:
    mine, theirs = socket.socketpair()
    client = Worker(0, {1: mine}, patience_s=0.5)
    ACTIVITY.waiting = True
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        theirs.sendall(json.dumps(BEAT).encode() + b"\n")
        time.sleep(TICK_S)
    assert not client.ended.is_set()
    client.control.close()


def test_the_first_cause_reaches_every_worker() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    client = Worker(0, {1: pairs[0][0], 2: pairs[1][0]})
    servers = [Worker(rank, {0: pair[1]}) for rank, pair in enumerate(pairs, start=1)]
    servers[0].control.announce("worker 1: ValueError: broken")
    for worker in (client, servers[1]):
        until(lambda worker=worker: worker.control.cause)
        assert worker.control.first_cause(LinkError("worker 1 is gone")) == "worker 1: ValueError: broken"
        assert worker.control.first_cause(KeyError("mine")).startswith(f"worker {worker.control.rank}: KeyError")
        until(worker.ended.is_set)  # its main thread did not end by itself


def test_a_closed_connection_is_a_worker_that_is_gone() -> None:
    mine, theirs = socket.socketpair()
    client = Worker(0, {1: mine})
    theirs.close()
    until(client.ended.is_set)
    assert client.causes == ["worker 1 is gone: it closed the connection, no heartbeat yet"]


def test_a_worker_that_closes_the_channel_is_not_gone() -> None:
    mine, theirs = socket.socketpair()
    client, server = Worker(0, {1: mine}), Worker(1, {0: theirs})
    server.control.close()
    time.sleep(2 * PATIENCE_S)
    assert not client.ended.is_set()
    client.control.close()


@pytest.mark.parametrize(
    "junk", [b"\xff\xfe\n", b"[1]\n", b"{}\n", b'{"step": "x"}\n', b'{"step": 1e999}\n', b"[" * 9000 + b"\n", b"\n"]
)
def test_damaged_lines_are_left_out(junk: bytes) -> None:
    mine, theirs = socket.socketpair()
    client = Worker(0, {1: mine}, patience_s=60)
    theirs.sendall(junk + json.dumps(BEAT).encode() + b"\n")
    until(lambda: client.control._peers[1].status)
    assert not client.ended.is_set()
    client.control.close()


def test_a_line_without_end_is_not_kept() -> None:
    mine, theirs = socket.socketpair()
    client = Worker(0, {1: mine}, patience_s=60)
    theirs.setblocking(False)  # nobody reads what comes after too much

    def gone_after_more() -> bool:
        with suppress(BlockingIOError, BrokenPipeError):
            theirs.send(b"x" * (1 << 14))
        return client.control._peers[1].gone

    until(gone_after_more)
    assert len(client.control._peers[1].received) <= 3 << 16
    until(client.ended.is_set)


def test_a_channel_that_fails_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(seconds: float) -> None:
        raise OSError(9, "bad descriptor")

    monkeypatch.setattr(control, "keep_alive", fail)
    mine, _theirs = socket.socketpair()
    client = Worker(0, {1: mine})
    until(client.ended.is_set)
    assert client.causes[0].startswith("worker 0: the control channel failed: ")


def test_a_spinning_thread_of_a_waiting_worker_is_no_progress() -> None:
    before, stop = Activity().status()["cpu_s"], threading.Event()

    def spin() -> None:
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            pass
        stop.set()

    thread = threading.Thread(target=spin)
    thread.start()
    assert stop.wait(60)
    thread.join()
    assert Activity().status()["cpu_s"] - before < 0.1


def test_the_heartbeat_reports_the_activity() -> None:
    before = Activity().status()["cpu_s"]
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    assert Activity().status()["cpu_s"] - before >= 0.2


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return mine, theirs


def outage_s(longest_ms: int) -> float:
    """Return how long TCP retransmits: 15 times, in pauses that double up to the longest."""
    pauses_s, pause_s = [], 0.2
    for _ in range(15):
        pauses_s.append(pause_s)
        pause_s = min(2 * pause_s, longest_ms / 1000)
    return sum(pauses_s)


@pytest.mark.parametrize("patience_s", [2.0, 20.0, 60.0, 300.0, 600.0])
def test_cuts_do_not_end_a_connection_within_the_patience(patience_s: float) -> None:
    pair = tcp_pair()
    control.keep_alive(patience_s, control={pair[0].fileno()})
    retries_ms = []
    for end in pair:
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        with suppress(OSError):  # an older kernel
            retries_ms.append(end.getsockopt(socket.IPPROTO_TCP, control._TCP_RTO_MAX_MS))
        end.close()
    assert all(outage_s(longest_ms) > patience_s for longest_ms in retries_ms)


def test_a_connection_that_fails_is_named_with_its_error() -> None:
    mine, theirs = tcp_pair()
    client = Worker(0, {1: mine})
    theirs.sendall(json.dumps(BEAT).encode() + b"\n")
    until(lambda: client.control._peers[1].status)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends RST
    theirs.close()
    until(client.ended.is_set)
    assert client.causes == ["worker 1 is gone: connection reset by peer (ECONNRESET), last: step 40, stage 1 forward"]


def test_a_cause_is_sent_completely_to_a_peer_that_has_not_read_for_long() -> None:
    mine, theirs = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's minimum: some lines
    client = Worker(0, {1: mine}, patience_s=60)
    until(lambda: client.control._peers[1].unsent)
    client.control.announce("worker 0: broken")
    heard = b""
    theirs.settimeout(20)
    while b"broken" not in heard:
        heard += theirs.recv(1 << 16)
    *beats, cause = [json.loads(line) for line in heard.splitlines()]
    assert cause == {"end": "worker 0: broken"}
    assert all("step" in beat for beat in beats)
    client.control.close()


def test_the_queue_of_a_peer_that_does_not_read_is_bounded() -> None:
    mine, _theirs = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    peer = control.Peer(mine)
    mine.setblocking(False)
    for _ in range(1000):
        peer.send(BEAT, droppable=True)
    assert 0 < len(peer.unsent) <= len(json.dumps(BEAT)) + 1


def test_text_of_peers_cannot_control_a_terminal() -> None:
    mine, theirs = socket.socketpair()
    client = Worker(0, {1: mine})
    beat = BEAT | {"doing": "a\x1b[2Jb"}
    theirs.sendall(
        b"".join(json.dumps(each).encode() + b"\n" for each in (beat, {"end": "\x1b]0;OWNED\x07\nthinpipe: x"}))
    )
    until(client.ended.is_set)
    assert client.causes == ["?]0;OWNED? thinpipe: x"]
    assert client.control._peers[1].status["doing"] == "a?[2Jb"


def test_a_cut_is_no_standstill() -> None:
    mine, theirs = socket.socketpair()
    client = Worker(0, {1: mine}, patience_s=1000)
    theirs.sendall(json.dumps(BEAT | {"waiting": True}).encode() + b"\n")
    until(lambda: client.control._peers[1].status)
    client.control.close()
    ACTIVITY.waiting = True
    peer = client.control._peers[1]
    for silent_s, stuck_s in ((0.0, 5.0), (LATE_S / 2, 10.0), (2 * LATE_S, 0.0), (0.0, 5.0)):
        peer.silent_s = silent_s
        client.control._count_standstill(5.0)
        assert client.control._stuck_s == stuck_s
