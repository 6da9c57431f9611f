"""The rendezvous: all workers, no strangers, and a timeout."""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from thinpipe.comm import rendezvous
from thinpipe.comm.errors import LinkError, WorkerError
from thinpipe.comm.rendezvous import Patience, bounded, connect_control, make_store, own_address_towards

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def patience(seconds: float = 20, lines: list[str] | None = None) -> Patience:
    return Patience(seconds, [].append if lines is None else lines.append)


def join_in_thread(store: Any, rank: int, size: int, found: dict[int, Any]) -> threading.Thread:
    def join() -> None:
        found[rank] = connect_control(store, rank, size, LOOPBACK, patience())

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    return thread


def test_the_client_is_connected_with_everybody() -> None:
    store, found = dist.HashStore(), {}
    threads = [join_in_thread(store, rank, 3, found) for rank in (0, 1, 2)]
    for thread in threads:
        thread.join(20)
    assert sorted(found[0]) == [1, 2]
    for rank in (1, 2):
        found[0][rank].sendall(bytes([rank]))
        assert found[rank][0].recv(1) == bytes([rank])


def test_strangers_are_not_let_in() -> None:
    store, found = dist.HashStore(), {}
    client = join_in_thread(store, 0, 2, found)
    facts = json.loads(store.get(rendezvous._KEY))
    address = (facts["host"], facts["port"])
    for hello in (b"\x80\x04junk\n", b"{}\n", b'{"worker": 1, "secret": "x"}\n', b"x" * 10_000, b""):
        with socket.create_connection(address, 5) as stranger, suppress(OSError):  # it hangs up on who sends too much
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b"", "a stranger was welcomed"
    twin = json.dumps({"worker": 5, "secret": facts["secret"]}).encode() + b"\n"
    with socket.create_connection(address, 5) as stranger:
        stranger.sendall(twin)
        assert stranger.recv(1) == b""
    join_in_thread(store, 1, 2, found).join(20)
    client.join(20)
    assert list(found[0]) == [1]


def test_a_missing_worker_is_reported_and_then_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "WARN_S", 0.3)
    lines: list[str] = []
    with pytest.raises(LinkError, match=r"1 of 3 workers are here, workers 1, 2 have not come, 1 s after the start"):
        connect_control(dist.HashStore(), 0, 3, LOOPBACK, Patience(1.0, lines.append))
    assert lines[0].startswith("1 of 3 workers are here, workers 1, 2 have not come")


def test_a_client_that_is_missing_is_named_and_then_given_up() -> None:
    port = free_port()
    with pytest.raises(LinkError, match=rf"worker 0 does not answer at 127.0.0.1:{port}"):
        make_store(1, 2, LOOPBACK, port, Patience(1.0, [].append))


def test_the_store_listens_at_the_given_address_only() -> None:
    port = free_port()
    store = make_store(0, 2, LOOPBACK, port, patience()).store
    other = make_store(1, 2, LOOPBACK, port, patience()).store
    other.set("a", "b")
    assert store.get("a") == b"b"
    listens = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"]
    assert f"0100007F:{port:04X}" in listens
    assert f"00000000:{port:04X}" not in listens


def test_a_port_that_is_taken_is_an_error_with_a_remedy() -> None:
    with (
        socket.create_server((LOOPBACK, 0)) as taken,
        pytest.raises(WorkerError, match="Name an address of this machine and a free port") as caught,
    ):
        make_store(0, 2, LOOPBACK, taken.getsockname()[1], patience())
    assert caught.value.code == 2


def test_the_port_is_closed_after_connecting_and_the_store_remains() -> None:
    port = free_port()
    master = make_store(0, 2, LOOPBACK, port, patience())
    other = make_store(1, 2, LOOPBACK, port, patience()).store
    master.stop_listening()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port), 5)
    other.set("a", "b")
    assert master.store.get("a") == b"b"


@pytest.mark.parametrize("length", [100, 8 << 30])
def test_half_a_message_of_a_stranger_delays_no_worker(length: int) -> None:
    port = free_port()
    master = make_store(0, 2, LOOPBACK, port, patience())
    with socket.create_connection((LOOPBACK, port), 5) as stranger:
        head = b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + struct.pack("<Q", 1) + b"k"  # hello; SET of "k"
        stranger.sendall(head + struct.pack("<Q", length) + b"abc")
        other = make_store(1, 2, LOOPBACK, port, patience()).store
        other.set("a", "b")
        assert master.store.get("a") == b"b"
        assert not master.store.check(["k"])
        del other, master  # waits for the thread of the store, which ends though the stranger is still there


def test_silent_strangers_do_not_delay_a_worker() -> None:
    store, found = dist.HashStore(), {}
    client = join_in_thread(store, 0, 2, found)
    facts = json.loads(store.get(rendezvous._KEY))
    with ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(socket.create_connection((facts["host"], facts["port"]), 5))
        join_in_thread(store, 1, 2, found).join(20)
        client.join(20)
        assert list(found[0]) == [1]


def test_a_worker_whose_connection_was_dropped_comes_again() -> None:
    store, found = dist.HashStore(), {}
    with socket.create_server((LOOPBACK, 0)) as listener:
        facts = {"host": LOOPBACK, "port": listener.getsockname()[1], "secret": "s"}
        store.set(rendezvous._KEY, json.dumps(facts))
        worker = join_in_thread(store, 1, 2, found)
        listener.accept()[0].close()
        connection, _ = listener.accept()
        with connection:
            assert json.loads(connection.recv(1000)) == {"worker": 1, "secret": "s"}
            connection.sendall(b"\n")
            worker.join(20)
    assert list(found[1]) == [0]


@pytest.mark.parametrize("junk", [b"", b"\xff", b"[1]", b'{"host": 1}', b'{"host": "", "port": "x", "secret": 1}'])
def test_junk_in_place_of_the_address_is_one_line(junk: bytes) -> None:
    store = dist.HashStore()
    store.set(rendezvous._KEY, junk)
    with pytest.raises(LinkError, match="something else writes to its port"):
        connect_control(store, 1, 2, LOOPBACK, patience())


def test_an_answer_from_something_else_is_one_line_within_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_GIVE_UP_S", 0.1)
    limit = patience(0.5)
    with socket.create_server((LOOPBACK, 0)) as silent, pytest.raises(LinkError, match="does not go on: look at"):
        bounded(lambda: make_store(1, 2, LOOPBACK, silent.getsockname()[1], limit), limit)


def test_a_name_that_cannot_be_resolved_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([socket.gaierror(-3, "Temporary failure in name resolution"), LOOPBACK])

    def resolve(host: str) -> str:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(rendezvous, "address_towards", resolve)
    assert own_address_towards("client", patience()) == LOOPBACK


def test_a_name_that_stays_unknown_is_one_line() -> None:
    with pytest.raises(LinkError, match=r"the name nowhere\.invalid of worker 0 cannot be resolved .* give the IP"):
        own_address_towards("nowhere.invalid", patience(0.5))


def test_workers_that_came_report_those_that_did_not() -> None:
    store, errors = dist.HashStore(), {}

    def join(rank: int) -> None:
        try:
            connect_control(store, rank, 3, LOOPBACK, patience(1.0))
        except LinkError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert "2 of 3 workers are here, worker 1 has not come" in errors[0]
    assert errors[2] == errors[0]
