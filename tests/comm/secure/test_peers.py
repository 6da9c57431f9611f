"""Known peers: kept on disk, shared by processes, and a damaged file is one error."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from thinpipe.comm.secure.identity import fingerprint_text
from thinpipe.comm.secure.peers import KnownPeers

A, B = b"a" * 32, b"b" * 32


def test_peers_are_remembered_and_forgotten(tmp_path: Path) -> None:
    peers = KnownPeers(tmp_path / "keys")
    assert A not in peers
    assert peers.names == {}
    peers.remember(A, "laptop")
    peers.remember(B, "gpu")
    again = KnownPeers(tmp_path / "keys")
    assert again.names == {A: "laptop", B: "gpu"}
    again.forget(A)
    again.forget(A)
    assert A not in peers
    assert B in peers
    assert stat.S_IMODE(peers.path.stat().st_mode) == 0o600


def test_a_peer_that_comes_again_keeps_its_date_and_its_name(tmp_path: Path) -> None:
    peers = KnownPeers(tmp_path)
    peers.remember(A, "laptop")
    rows = json.loads(peers.path.read_text())
    rows["peers"][fingerprint_text(A)] |= {"since": "2001-02-03T04:05:06+00:00", "seen": "2001-02-03T04:05:06+00:00"}
    peers.path.write_text(json.dumps(rows))
    peers.remember(A)
    found = peers.read()[A]
    assert (found.name, found.since[:4]) == ("laptop", "2001")
    assert found.seen > found.since
    peers.remember(A, "desktop")
    assert peers.names == {A: "desktop"}


def test_a_name_cannot_control_a_terminal_or_fill_the_disk(tmp_path: Path) -> None:
    peers = KnownPeers(tmp_path)
    peers.remember(A, "\x1b[2Jboo\nfoo" + "x" * 10**6)
    assert peers.names[A].startswith("?[2Jboo foox")
    assert len(peers.names[A]) == 100


def remember(folder: str, number: int) -> None:
    KnownPeers(Path(folder)).remember(number.to_bytes(32, "big"), str(number))


def test_processes_at_once_lose_no_peer(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(remember, [(str(tmp_path), number) for number in range(40)], chunksize=1)
    assert sorted(KnownPeers(tmp_path).names.values(), key=int) == [str(number) for number in range(40)]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"peers": 3}', b'{"peers": {"x": {}}}', b"\xff\xfe", b'{"peers": {"' + b"A" * 43 + b'": []}}'],
)
def test_a_damaged_file_is_one_error_and_kept(tmp_path: Path, content: bytes) -> None:
    peers = KnownPeers(tmp_path)
    peers.path.write_bytes(content)
    for call in (lambda: A in peers, lambda: peers.remember(A, "x"), lambda: peers.forget(A), lambda: peers.names):
        with pytest.raises(ValueError, match=r"peers\.json.*list of known peers") as error:
            call()
        assert "\n" not in str(error.value)
    assert peers.path.read_bytes() == content


def test_what_is_not_a_file_is_one_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "peers.json")
    with pytest.raises(ValueError, match=r"peers\.json cannot be read .*: it is a pipe"):
        KnownPeers(tmp_path).read()
