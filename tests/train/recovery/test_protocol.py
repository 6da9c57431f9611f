"""The messages of recovery, and the state machines by themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from thinpipe.train.recovery.coordinator import CoordinatorMachine
from thinpipe.train.recovery.member import MemberMachine
from thinpipe.train.recovery.messages import (
    CLIENT,
    Clock,
    End,
    FormGroup,
    Notice,
    Order,
    Phase,
    Policy,
    Report,
    SendTo,
    SnapshotId,
    Stop,
    message_json,
    parse_message,
)

ORDER = Order("run", 3, 7, 2, ("client", "a"), (1, 7), (0, 4, 8), SnapshotId(1, 4), end=None)
REPORT = Report("run", "a", 7, 12, phase=Phase.BROKEN, cause="connection reset")


@pytest.mark.parametrize("message", [ORDER, REPORT])
def test_messages_survive_json(message: Order | Report) -> None:
    assert parse_message(type(message), json.loads(json.dumps(message_json(message)))) == message


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Order, {"number": "3"}),
        (Order, {"number": True}),
        (Order, {"life": -1}),
        (Order, {"life": 1 << 63}),
        (Order, {"members": "client"}),
        (Order, {"members": ["client"]}),
        (Order, {"base": [1]}),
        (Order, {"lives": [1, "7"]}),
        (Order, {"cut": [0] * 1001}),
        (Order, {"other": 1}),
        (Report, {"phase": "dancing"}),
        (Report, {"leaving": 1}),
    ],
)
def test_malformed_messages_are_rejected(kind: Any, changes: dict[str, Any]) -> None:
    facts = json.loads(json.dumps(message_json(ORDER if kind is Order else REPORT)))
    with pytest.raises(ValueError, match=r"order|report|message"):
        parse_message(kind, facts | changes)


def test_texts_of_peers_are_sanitized() -> None:
    facts = message_json(REPORT._replace(cause="\x1b]0;owned\x07\nbye" + "x" * 3000))
    cause = parse_message(Report, facts).cause
    assert len(cause) == 2000
    assert cause.isprintable()


def test_a_gap_of_the_clock_hardly_counts_above_its_limit() -> None:
    clock = Clock(2.0)
    assert [clock.advance(now) for now in (100.0, 101.0, 5000.0, 3.0, 4.5)] == [0.0, 1.0, 1.5, 1.5, 3.0]


def member() -> MemberMachine:
    return MemberMachine("a", 7, every=2)


def test_a_member_ignores_older_orders_other_runs_and_other_lives() -> None:
    machine = member()
    assert [type(each) for each in machine.receive(0.0, ORDER)[:1]] == [FormGroup]
    for stale in (ORDER, ORDER._replace(number=2, attempt=9), ORDER._replace(number=9, run="other", attempt=9)):
        assert machine.receive(0.1, stale) == []
    assert machine.receive(0.1, ORDER._replace(number=9, life=8, attempt=9)) == []
    assert machine.receive(0.1, ORDER._replace(number=4, attempt=3))[0] == Stop(2)


def test_only_members_of_the_attempt_are_admitted() -> None:
    machine = member()
    assert not machine.admits("run", 2, CLIENT, 1)
    machine.receive(0.0, ORDER)
    assert machine.admits("run", 2, CLIENT, 1)
    for stranger in (("run", 1, CLIENT, 1), ("run", 2, CLIENT, 2), ("run", 2, "b", 1), ("other", 2, CLIENT, 1)):
        assert not machine.admits(*stranger)


def test_a_member_that_leaves_before_a_run_ends_at_once() -> None:
    assert member().leave(0.0)[-1] == End("", 0)


def test_what_is_known_of_a_member_replaces_what_another_reports() -> None:
    """A killed server is the cause, not the connection that its neighbour lost."""
    policy = Policy("run", 2, 2, {3: (0, 1, 2, 3)}, end_s=5.0)
    machine, members = CoordinatorMachine(policy), (CLIENT, "a", "b")
    number = 0

    def report(name: str, now: float, **state: Any) -> list[Any]:
        nonlocal number
        number += 1
        heard = state.pop("heard", 10**6)
        return machine.receive(now, Report("run", name, 1 + members.index(name), number, heard, **state))

    for name in members:
        report(name, 0.0)
        report(name, 0.0, phase=Phase.IDLE)
    assert machine.attempt == 1
    for name in members:
        report(name, 0.1, attempt=1, phase=Phase.READY)
    report("a", 0.2, attempt=1, phase=Phase.BROKEN, cause="connection reset", blames="b")
    actions = machine.lost(0.3, "b", 3, "killed by signal 9")
    assert Notice("b: killed by signal 9") in actions
    ends = [each for now in range(1, 9) for each in machine.tick(float(now)) if isinstance(each, End)]
    assert [each.cause.split(";")[0] for each in ends] == ["b: killed by signal 9"]
    orders = [each.order for each in machine.tick(9.0) if isinstance(each, SendTo)]
    assert {each.end for each in orders} == {ends[0].cause}
