"""Connections between client and server that break in the middle of a run, and strangers at the port."""

from __future__ import annotations

import random
import re
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.train.serve.machines import DIGITS, LIMIT_S, machines
from tests.train.serve.proxy import proxied
from thinpipe.lab.records.record import Record

pytestmark = pytest.mark.timeout(3 * LIMIT_S)
CUTS = 4
READABLE = ("thinpipe", "torch", "digits", "compress_forward", "batch_size", "conv_stem", "tile:8", "worker", "sha256")


def sha_of(path: Path) -> str:
    return str(Record.read(path).rows[0]["parameters_sha256"])


def test_nothing_is_readable_and_connections_that_break_are_made_again_and_change_nothing(tmp_path: Path) -> None:
    run = [*DIGITS[:6], "--epochs", str(CUTS + 1), *DIGITS[8:], "--threads", "1"]
    with machines(tmp_path, "client", "server") as (client, server):
        serving = server.type("serve", "--listen", "127.0.0.1:0", "--threads", "1", "--once")
        with proxied(serving.ticket()) as (proxy, ticket):
            command = client.type("train", *run, "--servers", ticket, "--json", "cut.json")
            for epoch in range(1, CUTS + 1):
                command.shows(f"epoch +{epoch}/{CUTS + 1}")
                proxy.cut()  # the desk, too, which the run does not need any more
            assert command.wait() == serving.wait() == 0, command.err + serving.err
            assert proxy.connections > 2
            assert proxy.recorded is not None
            recorded = bytes(proxy.recorded)
        local = client.type("train", *run, "--workers", "2", "--json", "local.json")
        assert local.wait() == 0, local.err
        assert sha_of(client.folder / "cut.json") == sha_of(client.folder / "local.json")
    assert len(recorded) > 500_000
    assert b"\x16\x03\x01" in recorded  # the client's first record of TLS
    assert [word for word in READABLE if word.encode() in recorded] == []


def test_strangers_on_the_port_do_not_disturb_a_run(tmp_path: Path) -> None:
    chosen = random.Random(0)
    with machines(tmp_path, "client", "server") as (client, server):
        serving = server.type("serve", "--listen", "127.0.0.1:0", "--threads", "1", "--once")
        host, _, port = serving.ticket().split("/")[2].rpartition(":")
        run = [*DIGITS[:6], "--epochs", "3", *DIGITS[8:], "--threads", "1"]
        command = client.type("train", *run, "--servers", serving.ticket())
        command.shows("epoch +1/3")
        opened = []
        for number in range(120):
            stranger = socket.create_connection((host, int(port)), timeout=10)
            with suppress(OSError):  # the gate may have closed it
                stranger.sendall((bytes(16) if number % 3 else chosen.randbytes(16)) + chosen.randbytes(number))
            opened.append(stranger)
            if number % 2:
                opened.pop(0).close()
        assert command.wait() == serving.wait() == 0, command.err + serving.err
        for each in opened:
            each.close()


def test_a_server_that_is_reached_only_once_ends_the_run_on_both_sides_after_the_patience(tmp_path: Path) -> None:
    with machines(tmp_path, "client", "server") as (client, server):
        serving = server.type("serve", "--listen", "127.0.0.1:0", "--threads", "1", "--once")
        with proxied(serving.ticket(), most=1) as (_, ticket):
            command = client.type("train", *DIGITS, "--servers", ticket, "--patience", "3")
            assert command.wait() == serving.wait() == 1
        assert "Traceback" not in command.err + serving.err
        for each in (command, serving):  # one of them notices it first, and reports it to the other
            assert re.search(r"worker [01] is gone: no connection for \d+ s", each.err), each.err
