"""thinpipe peers: lists the machines that this one knows, and removes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinpipe.cli.app import app
from thinpipe.comm.secure.identity import fingerprint_text, own_identity
from thinpipe.comm.secure.peers import KnownPeers

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownPeers:
    monkeypatch.setenv("THINPIPE_HOME", str(tmp_path / "keys"))
    return KnownPeers()


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["peers", *words])
    return result.exit_code, result.output


def test_the_own_key_is_made_and_shown_before_any_peer_is_known(known: KnownPeers) -> None:
    code, text = run()
    assert code == 0
    assert text == (
        f"this machine: {fingerprint_text(own_identity().fingerprint)}\n\n"
        "no known machines: one is remembered when it connects with a ticket\n"
    )
    assert run() == (code, text)


def test_peers_are_listed_with_their_dates(known: KnownPeers) -> None:
    known.remember(A, "laptop")
    known.remember(B, "gpu box")
    code, text = run()
    assert code == 0
    (row,) = [line for line in text.splitlines() if fingerprint_text(A) in line]
    assert row.split() == [fingerprint_text(A), "laptop", known.read()[A].since[:10], known.read()[A].seen[:10]]
    assert "gpu box" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("wanted", ["laptop", fingerprint_text(A), fingerprint_text(A)[:8]])
def test_a_peer_is_removed_by_its_name_or_fingerprint(known: KnownPeers, wanted: str) -> None:
    known.remember(A, "laptop")
    known.remember(B, "gpu")
    assert run("--remove", wanted) == (0, f"removed laptop ({fingerprint_text(A)})\n")
    assert known.names == {B: "gpu"}


@pytest.mark.parametrize("wanted", ["desktop", "", "lap", fingerprint_text(C)])
def test_what_is_not_known_is_an_error_and_nothing_is_removed(known: KnownPeers, wanted: str) -> None:
    known.remember(A, "laptop")
    code, text = run("--remove", wanted)
    assert code == 2
    assert text.startswith("thinpipe: --remove takes the name or the fingerprint of a known machine; got ")
    assert known.names == {A: "laptop"}


def test_a_name_that_two_have_is_an_error_with_their_fingerprints(known: KnownPeers) -> None:
    known.remember(A, "gpu")
    known.remember(B, "gpu")
    code, text = run("--remove", "gpu")
    assert (code, text) == (
        2,
        f"thinpipe: --remove gpu fits 2 machines, {fingerprint_text(A)} and {fingerprint_text(B)}: "
        "give a fingerprint\n",
    )
    assert set(known.names) == {A, B}


def test_a_peer_cannot_hide_behind_the_fingerprint_of_another(known: KnownPeers) -> None:
    known.remember(A, "laptop")
    known.remember(B, fingerprint_text(A))
    assert run("--remove", fingerprint_text(A)) == (0, f"removed laptop ({fingerprint_text(A)})\n")
    assert set(known.names) == {B}


def test_a_damaged_list_and_a_damaged_key_are_one_line(known: KnownPeers) -> None:
    known.remember(A, "laptop")
    known.path.write_text("{")
    for words in ((), ("--remove", "laptop")):
        code, text = run(*words)
        assert (code, text.count("\n")) == (2, 1)
        assert "peers.json cannot be read as the list of known peers" in text
    own_identity().path.write_text("")
    code, text = run()
    assert (code, text.count("\n")) == (2, 1)
    assert "identity.pem cannot be read as this machine's key: it is empty; restore it" in text
