"""Connections of TCP before a handshake: their options, routes, addresses and congestion control."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.comm.secure.meeting import receive
from thinpipe.comm.secure import handshake
from thinpipe.comm.secure.handshake import DESK, HandshakeError, connect

ROUTE = b"a route, 16 long"


def test_a_connection_has_the_options_of_a_run_and_sends_its_route() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        connect("127.0.0.1", server.getsockname()[1], ROUTE, timeout_s=20) as raw,
        server.accept()[0] as peer,
    ):
        assert receive(peer, 16) == ROUTE
        tcp = socket.IPPROTO_TCP
        assert raw.getsockopt(tcp, socket.TCP_NODELAY)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert raw.getsockopt(tcp, socket.TCP_KEEPCNT) * raw.getsockopt(tcp, socket.TCP_KEEPINTVL) == 60
        assert raw.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 0
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
        used = raw.getsockopt(tcp, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        assert used == "cubic" or "cubic" not in allowed
        assert raw.gettimeout() is None


@pytest.mark.parametrize(
    ("repeated", "sent", "control"),
    [(0, 0, "cubic"), (19, 20, "cubic"), (20, 20_000, "cubic"), (200, 20_000, "bbr")],
)
def test_a_lossy_connection_changes_to_bbr(
    monkeypatch: pytest.MonkeyPatch, repeated: int, sent: int, control: str
) -> None:
    class Lossy(socket.socket):
        def getsockopt(self, level: int, name: int, size: int = 0) -> Any:
            info = bytearray(144)
            struct.pack_into("I", info, 100, repeated)
            struct.pack_into("I", info, 136, sent)
            return bytes(info) if name == socket.TCP_INFO else super().getsockopt(level, name, size)

    with Lossy() as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        allowed = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        handshake.adapt_to_loss(raw)
        used = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        assert used == (control if control in allowed else "cubic")


def test_a_kernel_without_the_options_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "set_keep_alive", lambda *_: os.open("/nowhere", os.O_RDONLY))  # any OSError
    monkeypatch.setattr(socket, "TCP_CONGESTION", 9999)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect("127.0.0.1", server.getsockname()[1], DESK, timeout_s=20).close()


def test_the_next_address_of_a_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with connect("two.example", port, DESK, timeout_s=20) as raw:
            assert raw.getpeername() == ("127.0.0.1", port)


def test_a_host_that_does_not_answer_or_has_no_name_may_be_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(HandshakeError, match=rf"127\.0\.0\.1:{port} does not answer \(Connection refused\)") as refused:
        connect("127.0.0.1", port, DESK, timeout_s=20)
    for name in ("nowhere.invalid", "a" * 70 + ".example", "..", ""):
        with pytest.raises(HandshakeError, match="does not answer") as unknown:
            connect(name, port, DESK, timeout_s=20)
        assert not refused.value.final
        assert not unknown.value.final
