"""Bugs planted in the protocol, one function each, which the simulator has to find."""

from __future__ import annotations

import math
from typing import Any

import pytest

from thinpipe.train.recovery.coordinator import CoordinatorMachine
from thinpipe.train.recovery.member import MemberMachine
from thinpipe.train.recovery.messages import MemberAction, Order, Phase, SnapshotId, Take


def lost_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """Send every order once, as if that were enough for it to arrive."""
    flush = CoordinatorMachine._flush
    patch.setattr(CoordinatorMachine, "_flush", lambda self, now, *, is_tick=False: flush(self, now))


def late_snapshot(patch: pytest.MonkeyPatch) -> None:
    """Take the periodic snapshots of one server a step late, under the number of the step before."""
    step_done = MemberMachine.step_done

    def late(self: MemberMachine, now: float, attempt: int, step: int, **options: Any) -> list[MemberAction]:
        actions = step_done(self, now, attempt, step, **options)
        if self.name != "server1" or self.phase != Phase.RUNNING:
            return actions
        if step % self.every == 1:
            self._owed = SnapshotId(attempt, step - 1)
            return [Take(self._owed)]
        return [each for each in actions if type(each) is not Take]

    patch.setattr(MemberMachine, "step_done", late)


def double_takeover(patch: pytest.MonkeyPatch) -> None:
    """Let a spare take the place of worker 1 in an attempt after the first, in addition to the member that has it."""
    order_for = CoordinatorMachine._order

    def doubled(self: CoordinatorMachine, peer: Any) -> Order:
        order = order_for(self, peer)
        if self._number < 50 or not order.members or peer.name in order.members or peer.report.leaving:
            return order
        members, lives = order.members, order.lives
        return order._replace(members=(members[0], peer.name, *members[2:]), lives=(lives[0], peer.life, *lives[2:]))

    patch.setattr(CoordinatorMachine, "_order", doubled)


def forgotten_timer(patch: pytest.MonkeyPatch) -> None:
    """Wait for a lost server without a limit, although the model could be cut among those that are left."""
    create = CoordinatorMachine.__init__
    patch.setattr(CoordinatorMachine, "__init__", lambda self, policy: create(self, policy._replace(return_s=math.inf)))


def stale_peer(patch: pytest.MonkeyPatch) -> None:
    """Admit every peer that has the name of a member, from whichever attempt and life it comes."""

    def admits(self: MemberMachine, run: str, attempt: int, name: str, life: int) -> bool:
        return run == self.run and self._order is not None and name in self._order.members

    patch.setattr(MemberMachine, "admits", admits)


PLANTED = (lost_acknowledgement, late_snapshot, double_takeover, forgotten_timer, stale_peer)
