"""Workers that meet: all of them, nobody else, and not for ever."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from thinpipe.workers import membership
from thinpipe.workers.errors import LinkError
from thinpipe.workers.membership import Patience, address_of, address_towards, interface_with, make_store, meet

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def patience(seconds: float = 20, said: list[str] | None = None) -> Patience:
    return Patience(seconds, [].append if said is None else said.append)


def join_in_thread(store: Any, rank: int, size: int, found: dict[int, Any]) -> threading.Thread:
    def join() -> None:
        found[rank] = meet(store, rank, size, LOOPBACK, patience())

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
    facts = json.loads(store.get(membership._KEY))
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


def test_who_is_missing_is_named_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "WARN_S", 0.3)
    said: list[str] = []
    with pytest.raises(LinkError, match=r"1 of 3 workers are here, workers 1, 2 have not come, 1 s after the start"):
        meet(dist.HashStore(), 0, 3, LOOPBACK, Patience(1.0, said.append))
    assert said[0].startswith("1 of 3 workers are here, workers 1, 2 have not come")


def test_a_client_that_is_missing_is_named_and_then_given_up() -> None:
    port = free_port()
    with pytest.raises(LinkError, match=rf"worker 0 does not answer at 127.0.0.1:{port}"):
        make_store(1, 2, LOOPBACK, port, Patience(1.0, [].append))


def test_the_store_listens_where_it_was_told_to_and_nowhere_else() -> None:
    port = free_port()
    store = make_store(0, 2, LOOPBACK, port, patience())
    other = make_store(1, 2, LOOPBACK, port, patience())
    other.set("a", "b")
    assert store.get("a") == b"b"
    listens = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"]
    assert f"0100007F:{port:04X}" in listens
    assert f"00000000:{port:04X}" not in listens


def test_a_port_that_is_taken_is_an_error_with_a_remedy() -> None:
    with (
        socket.create_server((LOOPBACK, 0)) as taken,
        pytest.raises(ValueError, match="Name an address of this machine and a free port"),
    ):
        make_store(0, 2, LOOPBACK, taken.getsockname()[1], patience())


def test_addresses_and_interfaces() -> None:
    assert address_of("lo") == LOOPBACK
    assert interface_with(LOOPBACK) == "lo"
    assert interface_with("203.0.113.7") is None
    assert address_towards(LOOPBACK) == LOOPBACK


def test_those_who_came_hear_who_did_not() -> None:
    store, errors = dist.HashStore(), {}

    def join(rank: int) -> None:
        try:
            meet(store, rank, 3, LOOPBACK, patience(1.0))
        except LinkError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert "2 of 3 workers are here, worker 1 has not come" in errors[0]
    assert errors[2] == errors[0]
