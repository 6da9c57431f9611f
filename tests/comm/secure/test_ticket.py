"""Tickets are read back, every damage is found when they are read, and secrets admit no more than they may."""

from __future__ import annotations

import os
import re
import string
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.comm.secure import ticket as module
from thinpipe.comm.secure.peers import KnownPeers
from thinpipe.comm.secure.ticket import Admission, Ticket, Verdict

ALPHABET = string.ascii_letters + string.digits + "-_"
TICKET = Ticket("gpu.example", 7000, bytes(range(32)), bytes(range(100, 116)))
HOSTS = ("gpu.example", "127.0.0.1", "::1", "fe80::1%eth0", "2001:db8::7", "GPU-box_2", "bücher.example")


@pytest.mark.parametrize("host", HOSTS)
def test_a_ticket_is_read_back(host: str) -> None:
    for port in (1, 7000, 65535):
        ticket = Ticket(host, port, os.urandom(32), os.urandom(16))
        assert Ticket.parse(str(ticket)) == ticket
        assert Ticket.parse(f"  {ticket}\n") == ticket


def test_a_ticket_is_one_word_that_can_be_pasted_into_a_shell() -> None:
    assert re.fullmatch(r"thinpipe://gpu\.example:7000/[A-Za-z0-9_-]{72}", str(TICKET))
    assert str(Ticket("::1", 7000, TICKET.fingerprint, TICKET.secret)).startswith("thinpipe://[::1]:7000/")


def test_every_wrong_character_of_the_code_is_found() -> None:
    text = str(TICKET)
    start = text.rindex("/") + 1
    for position in range(start, len(text)):
        for character in ALPHABET.replace(text[position], ""):
            with pytest.raises(ValueError, match="checksum of the ticket does not match"):
                Ticket.parse(text[:position] + character + text[position + 1 :])


def test_exchanged_and_missing_characters_are_found() -> None:
    text = str(TICKET)
    for position in range(text.rindex("/") + 1, len(text) - 1):
        first, second = text[position : position + 2]
        if first != second:
            with pytest.raises(ValueError, match="checksum"):
                Ticket.parse(text[:position] + second + first + text[position + 2 :])
        with pytest.raises(ValueError, match="has 72 characters; got 71: copy all of it"):
            Ticket.parse(text[:position] + text[position + 1 :])


def test_the_owner_may_put_in_the_address_by_which_the_listener_is_reached() -> None:
    moved = Ticket.parse(str(TICKET).replace("gpu.example:7000", "home.example:443"))
    assert (moved.host, moved.port, moved.secret) == ("home.example", 443, TICKET.secret)


CODE = str(TICKET).rpartition("/")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a ticket is thinpipe://HOST:PORT/CODE; got ''"),
        ("hello", "got 'hello'"),
        (f"https://gpu.example:7000/{CODE}", "a ticket is thinpipe://HOST:PORT/CODE"),
        ("thinpipe://gpu.example:7000", "a ticket is thinpipe://HOST:PORT/CODE"),
        (f"thinpipe://gpu.example/{CODE}", "a port of 1 to 65535; got 'gpu.example'"),
        (f"thinpipe://gpu.example:0/{CODE}", "got 'gpu.example:0'"),
        (f"thinpipe://gpu.example:65536/{CODE}", "got 'gpu.example:65536'"),
        (f"thinpipe://gpu.example:٣/{CODE}", "a port of"),
        (f"thinpipe://::1:7000/{CODE}", "IPv6 addresses in brackets"),
        (f"thinpipe://[::1:7000/{CODE}", "IPv6 addresses in brackets"),
        (f"thinpipe://:7000/{CODE}", "got ':7000'"),
        (f"thinpipe://user@gpu.example:7000/{CODE}", "got 'user@gpu.example:7000'"),
        (f"thinpipe://gpu.example:7000/{CODE[:30]} {CODE[30:]}", "no spaces or line breaks: paste it as one line"),
        (f"thinpipe://gpu.example:7000/{CODE[:30]}\n{CODE[30:]}", "no spaces or line breaks"),
        (f"thinpipe://gpu.example:7000/{CODE[:-1]}", "has 72 characters; got 71"),
        (f"thinpipe://gpu.example:7000/{CODE}/", "has 72 characters; got 73"),
        (f"thinpipe://gpu.example:7000/{CODE[:-1]}é", "a character of this one is damaged"),
        (f"thinpipe://gpu.example:7000/{CODE[:-1]}+", "a character of this one is damaged"),
        (f"thinpipe://gpu.example:7000/{CODE[:-4]}====", "a character of this one is damaged"),
    ],
)
def test_what_is_no_ticket_is_one_line_that_says_why(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        Ticket.parse(text)
    assert "\n" not in str(error.value)


@given(st.text(max_size=200) | st.text(max_size=80).map(lambda text: f"thinpipe://{text}/{CODE}"))
@settings(max_examples=500, deadline=None)
def test_any_text_is_a_ticket_or_one_error(text: str) -> None:
    try:
        ticket = Ticket.parse(text)
    except ValueError:
        return
    assert Ticket.parse(str(ticket)) == ticket


def test_the_secret_is_not_shown_by_errors_and_logs() -> None:
    assert repr(TICKET.secret) not in repr(TICKET)
    for wrong in (str(TICKET)[:-1], str(TICKET)[:-1] + "é", str(TICKET).replace("7000", "x")):
        with pytest.raises(ValueError, match="ticket") as error:
            Ticket.parse(wrong)
        assert CODE[43:60] not in str(error.value)


def proves(mine: bytes | None):
    return None if mine is None else lambda secret: secret == mine


def key(number: int) -> bytes:
    return bytes([number]) * 32


def admit(admission: Admission, number: int, secret: bytes | None) -> Verdict:
    return admission.admit(key(number), f"name {number}", proves(secret))


def test_a_secret_admits_as_many_new_peers_as_it_may_and_they_are_known_then(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path)
    admission = Admission(known)
    secret = admission.new_secret(2, 60)
    assert len(secret) == 16
    assert [admit(admission, number, secret) for number in (1, 2, 3)] == [
        *(Verdict.ADMITTED, Verdict.ADMITTED, Verdict.EXHAUSTED)
    ]
    assert known.names == {key(1): "name 1", key(2): "name 2"}
    assert admit(admission, 1, None) == admit(Admission(KnownPeers(tmp_path)), 2, None) == Verdict.ADMITTED
    assert admit(admission, 3, None) == Verdict.UNKNOWN


def test_a_known_peer_uses_up_nothing_with_any_ticket(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path)
    known.remember(key(1), "old")
    admission = Admission(known)
    secret = admission.new_secret(1, 60)
    for tried in (secret, bytes(16), None, secret):
        assert admit(admission, 1, tried) == Verdict.ADMITTED
    assert known.names[key(1)] == "old"
    assert admit(admission, 2, secret) == Verdict.ADMITTED


def test_a_removed_peer_is_unknown_at_once(tmp_path: Path) -> None:
    admission = Admission(KnownPeers(tmp_path))
    assert admit(admission, 1, admission.new_secret(1, 60)) == Verdict.ADMITTED
    KnownPeers(tmp_path).forget(key(1))  # as another process does
    assert admit(admission, 1, None) == Verdict.UNKNOWN


def test_an_expired_secret_is_told_from_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    admission = Admission(KnownPeers(tmp_path))
    first, second = admission.new_secret(5, 60), admission.new_secret(5, 120)
    now[0] += 59.9
    assert admit(admission, 1, first) == Verdict.ADMITTED
    now[0] += 0.1
    assert admit(admission, 2, first) == Verdict.EXPIRED
    assert admit(admission, 2, second) == Verdict.ADMITTED
    assert admit(admission, 3, bytes(16)) == Verdict.WRONG_SECRET
    assert admit(admission, 1, first) == Verdict.ADMITTED  # known by now


def test_only_allowed_keys_are_admitted_and_others_use_up_nothing(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path)
    known.remember(key(7), "known, and no longer allowed")
    admission = Admission(known, allowed={key(1)})
    secret = admission.new_secret(1, 60)
    assert admit(admission, 2, secret) == admit(admission, 7, None) == Verdict.NOT_ALLOWED
    assert admit(admission, 2, bytes(16)) == Verdict.WRONG_SECRET  # who is allowed is told to owners of tickets only
    assert admit(admission, 1, None) == Verdict.UNKNOWN
    assert admit(admission, 1, secret) == Verdict.ADMITTED
    assert key(2) not in known


def test_peers_at_once_do_not_share_the_last_use(tmp_path: Path) -> None:
    admission = Admission(KnownPeers(tmp_path))
    secret = admission.new_secret(3, 60)
    verdicts: list[Verdict] = []
    threads = [
        threading.Thread(target=lambda number=number: verdicts.append(admit(admission, number, secret)))
        for number in range(1, 17)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(verdicts) == [Verdict.ADMITTED] * 3 + [Verdict.EXHAUSTED] * 13
    assert len(KnownPeers(tmp_path).names) == 3


def test_a_damaged_list_of_peers_admits_nobody(tmp_path: Path) -> None:
    admission = Admission(KnownPeers(tmp_path))
    secret = admission.new_secret(1, 60)
    (tmp_path / "peers.json").write_text("{")
    with pytest.raises(ValueError, match=r"peers\.json"):
        admit(admission, 1, secret)
    (tmp_path / "peers.json").unlink()
    assert admit(admission, 1, secret) == Verdict.ADMITTED  # nothing was used up


def test_secrets_do_not_accumulate(tmp_path: Path) -> None:
    admission = Admission(KnownPeers(tmp_path))
    first, *_, last = [admission.new_secret(1, 60) for _ in range(1000)]
    assert admit(admission, 1, first) == Verdict.WRONG_SECRET
    assert admit(admission, 1, last) == Verdict.ADMITTED
