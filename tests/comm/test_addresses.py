"""Addresses and interfaces, of both families."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from thinpipe.comm import addresses
from thinpipe.comm.addresses import address_and_port, address_of, address_towards, interface_with, listen
from thinpipe.comm.errors import WorkerError

LOOPBACK = "127.0.0.1"
IF_INET6 = """fe800000000000000000000000000001 02 40 20 80 eth7
fd000000000000000000000000000005 02 40 00 80 eth7
"""


def test_loopback() -> None:
    assert address_of("lo") == LOOPBACK
    assert interface_with(LOOPBACK) == "lo"
    assert interface_with("203.0.113.7") is None
    assert address_towards(LOOPBACK) == LOOPBACK


def test_an_interface_with_ipv6_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "if_inet6").write_text(IF_INET6)
    monkeypatch.setattr(addresses, "_IPV6_ADDRESSES", tmp_path / "if_inet6")
    monkeypatch.setattr(addresses, "_is_up", lambda interface: True)
    assert address_of("eth7") == "fd00::5"  # not the link-local one, which needs a scope
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    assert interface_with("fd00::5") == "eth7"
    assert interface_with("fe80::1%eth7") == "eth7"


def test_an_interface_without_an_address_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_ipv4_of", lambda interface: None)
    monkeypatch.setattr(addresses, "_ipv6_of", lambda interface: [])
    with pytest.raises(
        WorkerError, match=r"loopback interface lo, .* is down or has no address: bring it up"
    ) as caught:
        address_of("lo")
    assert caught.value.code == 2
    with pytest.raises(WorkerError, match=r"interface eth9, .* GLOO_SOCKET_IFNAME"):
        address_of("eth9")


def test_an_interface_that_is_down_is_one_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"up": 0x49, "down": 0x48}
    monkeypatch.setattr(
        addresses, "_ask", lambda name, request: bytes(16) + struct.pack("HH4B", flags[name], 0, 10, 0, 0, 1)
    )
    assert address_of("up") == "10.0.0.1"
    with pytest.raises(WorkerError, match="is down"):
        address_of("down")


@pytest.mark.parametrize("host", [LOOPBACK, "::1"])
def test_listening_at_either_family(host: str) -> None:
    try:
        listener = listen(host, 0)
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")
    with listener, socket.create_connection((host, listener.getsockname()[1]), 5):
        assert listener.accept()


def test_how_they_are_written() -> None:
    assert address_and_port("10.0.0.1", 29400) == "10.0.0.1:29400"
    assert address_and_port("fd00::1", 29400) == "[fd00::1]:29400"
