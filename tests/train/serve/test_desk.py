"""The desk protocol: bounded messages, checked offers, and versions that may differ or not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from thinpipe.train.serve.desk import (
    LARGEST,
    Desk,
    Gone,
    Offer,
    Rejected,
    ServerFacts,
    facts_json,
    parse_facts,
    parse_offer,
    version_difference,
)
from thinpipe.train.serve.roster import Roster, RosterEntry, dialers_json, parse_dialers

ENTRIES = tuple(RosterEntry(name=f"m{n}", fingerprint=f"{n:064x}", host=f"10.0.0.{n}", port=7000) for n in range(4))
ROSTER = Roster("00" * 16, ENTRIES)
FACTS = ServerFacts(
    name="gpu", thinpipe="0.2.0", torch="2.13.0+cpu", transformers="5.22.0", python="3.11.7", device="cpu", memory=1
)
OFFER = Offer(
    run="00" * 16,
    verb="train",
    worker=1,
    client="laptop",
    thinpipe="0.2.0",
    torch="2.13.1+cu128",
    transformers="5.22.3",
    patience_s=60.0,
    settings={"task": "digits"},
    options={},
    files={},
    roster=ROSTER.to_json(),
)


@pytest.fixture
def ends() -> Iterator[tuple[Desk, socket.socket]]:
    one, other = socket.socketpair()
    yield Desk(one, "the peer"), other
    one.close()
    other.close()


def test_a_message_of_any_size_below_the_limit_arrives(ends: tuple[Desk, socket.socket]) -> None:
    desk, raw = ends
    other = Desk(raw, "the other")
    for size in (0, 1, 70_000):
        other.send(text="x" * size)
        assert desk.receive(5) == {"text": "x" * size}


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ((LARGEST + 1).to_bytes(4), f"it announced {LARGEST + 1} bytes"),
        ((2).to_bytes(4) + b"[]", "it is not an object"),
        ((1).to_bytes(4) + b"{", "Expecting property name"),
        ((200_000).to_bytes(4) + b"[" * 200_000, "recursion"),
        ((2).to_bytes(4) + b"\xff\xfe", "decode|column"),
    ],
)
def test_what_is_no_message_is_rejected(ends: tuple[Desk, socket.socket], sent: bytes, problem: str) -> None:
    desk, raw = ends
    raw.sendall(sent)
    with pytest.raises(Rejected, match=problem):
        desk.receive(5)


def test_silence_and_a_closed_connection_are_reported(ends: tuple[Desk, socket.socket]) -> None:
    desk, raw = ends
    with pytest.raises(Gone, match="the peer does not answer"):
        desk.receive(0.05)
    raw.sendall((5).to_bytes(4) + b"{")
    raw.close()
    with pytest.raises(Gone, match="the peer has closed the connection"):
        desk.receive(5)


def test_a_rejection_is_one_bounded_line_without_control_characters(ends: tuple[Desk, socket.socket]) -> None:
    desk, raw = ends
    Desk(raw, "").send(reject="\x1b[2Jbusy\n" + "x" * 5000)
    with pytest.raises(Rejected) as raised:
        desk.receive(5)
    line = str(raised.value)
    assert "busy" in line
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) <= 2100


def test_offers_and_facts_are_the_same_after_json() -> None:
    assert parse_offer(json.loads(json.dumps(facts_json(OFFER)))) == replace(OFFER, roster=tuple(OFFER.roster))
    assert parse_facts(json.loads(json.dumps(facts_json(FACTS)))) == FACTS


@pytest.mark.parametrize(
    "change",
    [
        {"run": "zz"},
        {"run": "00"},
        {"worker": 0},
        {"worker": 4},
        {"worker": True},
        {"patience_s": float("nan")},
        {"patience_s": -1.0},
        {"settings": []},
        {"roster": {}},
        {"more": 1},
        {"verb": None},
    ],
)
def test_an_offer_with_a_wrong_field_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(Rejected):
        parse_offer(facts_json(OFFER) | change)


@pytest.mark.parametrize(
    ("here", "found"),
    [
        ({}, None),
        ({"torch": "2.13.9"}, None),
        ({"torch": "2.12.0"}, "torch 2.13.1+cu128 on the client, 2.12.0 on gpu"),
        ({"thinpipe": "0.2.1"}, "thinpipe 0.2.0 on the client, 0.2.1 on gpu"),
        ({"transformers": "5.17.0"}, "transformers 5.22.3 on the client, 5.17.0 on gpu"),
        ({"python": "3.13.0"}, None),
    ],
)
def test_versions_that_matter_are_compared(here: dict[str, str], found: str | None) -> None:
    assert version_difference(OFFER, replace(FACTS, **here)) == found
    without = replace(OFFER, transformers=None)
    assert (version_difference(without, replace(FACTS, **here)) is None) == (found is None or "transformers" in found)


def test_every_connection_has_a_route_of_its_own_that_both_ends_know() -> None:
    pairs = [(one, other) for one in range(4) for other in range(one)]
    routes = {ROSTER.route(*pair) for pair in pairs}
    legs = {ROSTER.leg(one, other) for one in range(1, 4) for other in range(1, 4) if one != other}
    assert len(routes | legs) == len(routes) + len(legs) == 6 + 6
    assert all(len(each) == 16 for each in routes | legs)
    for one, other in pairs:
        assert ROSTER.route(other, one) == ROSTER.route(one, other)
        assert ROSTER.routes(one)[ROSTER.route(other, one)] == other
    assert ROSTER.routes(1)[ROSTER.leg(1, 3)] == 3
    assert routes.isdisjoint({Roster("01" * 16, ENTRIES).route(*pair) for pair in pairs})


def test_the_higher_worker_dials_if_it_can_else_the_lower_else_both_are_relayed() -> None:
    dialers = ROSTER.dialers({1: [2, 3], 2: [1], 3: []})
    assert dialers == {(1, 2): 2, (1, 3): 1, (2, 3): None}
    assert parse_dialers(json.loads(json.dumps(dialers_json(dialers))), ROSTER) == dialers


@pytest.mark.parametrize("facts", [None, {}, {"1-2": 3, "1-3": 1, "2-3": 2}, {"1-2": 1, "1-3": 1}, {"1-2": "1"}])
def test_a_start_that_names_others_than_the_pairs_is_rejected(facts: Any) -> None:
    with pytest.raises(ValueError, match=r"start names the pairs|dialled by one of them"):
        parse_dialers(facts, ROSTER)


@pytest.mark.parametrize("change", [{"fingerprint": "00"}, {"port": 70000}, {"name": 1}, {"fingerprint": "x" * 64}])
def test_a_roster_without_valid_keys_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fingerprint|name|hexadecimal"):
        Roster.from_json("00" * 16, [ROSTER.to_json()[0] | change])
