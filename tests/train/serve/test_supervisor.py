"""The addresses that a client can make a server connect to."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from thinpipe.train.serve import supervisor
from thinpipe.train.serve.desk import Rejected
from thinpipe.train.serve.peering import may_dial
from thinpipe.train.serve.roster import Roster, RosterEntry, dialers_json
from thinpipe.train.serve.supervisor import Supervisor

ELSEWHERE = "198.51.100.7"


@pytest.mark.parametrize(
    ("host", "client", "allowed"),
    [
        ("10.0.0.4", ELSEWHERE, True),
        ("2001:db8::4", ELSEWHERE, True),
        ("127.0.0.1", ELSEWHERE, False),
        ("127.8.0.1", ELSEWHERE, False),
        ("localhost", ELSEWHERE, False),
        ("::1", "2001:db8::7", False),
        ("::ffff:127.0.0.1", ELSEWHERE, False),
        ("0.0.0.0", ELSEWHERE, False),
        ("0", ELSEWHERE, False),
        ("2130706433", ELSEWHERE, False),
        ("169.254.169.254", ELSEWHERE, False),
        ("fe80::1%lo", ELSEWHERE, False),
        ("224.0.0.1", ELSEWHERE, False),
        ("no such name", ELSEWHERE, False),
        ("x" * 300, ELSEWHERE, False),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "::1", True),
    ],
)
def test_addresses_that_a_server_connects_to_for_a_client(host: str, client: str, allowed: bool) -> None:
    assert may_dial(host, client) is allowed


def run_with(hosts: list[str]) -> Any:
    """A run of worker 1 whose other servers have these addresses."""
    entries = [RosterEntry(name=str(n), fingerprint=f"{n:064x}", host=host, port=9) for n, host in enumerate(hosts, 2)]
    own = [RosterEntry(name=str(n), fingerprint=f"{n:064x}") for n in range(2)]
    return SimpleNamespace(roster=Roster("00" * 16, (*own, *entries)), offer=SimpleNamespace(worker=1))


def test_a_probe_connects_to_a_bounded_number_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled, lock = [], threading.Lock()

    def connect(host: str, *_: Any, **__: Any) -> socket.socket:
        with lock:
            dialled.append(host)
        raise ConnectionRefusedError

    monkeypatch.setattr(supervisor, "connect", connect)
    one = Supervisor(None, None, None, print, print)  # type: ignore[arg-type]
    run = run_with([f"10.0.0.{n}" for n in range(100)] + ["127.0.0.1"] * 5)
    for _ in range(2):
        assert one._probe(run, list(range(2, 107)), ELSEWHERE) == []
    assert len(dialled) == len(set(dialled)) == supervisor._MOST_PROBED


def test_a_start_with_another_address_is_rejected() -> None:
    run = run_with(["127.0.0.1"])
    supervisor._check_dialled(run, dialers_json({(1, 2): 2}), ELSEWHERE)
    supervisor._check_dialled(run, dialers_json({(1, 2): None}), ELSEWHERE)
    supervisor._check_dialled(run, dialers_json({(1, 2): 1}), "127.0.0.1")
    with pytest.raises(Rejected, match=r"does not connect to 127\.0\.0\.1 for a client elsewhere"):
        supervisor._check_dialled(run, dialers_json({(1, 2): 1}), ELSEWHERE)
