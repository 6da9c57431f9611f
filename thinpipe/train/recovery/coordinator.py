"""The protocol on the client: who is a member, when the group stops, from which snapshot it continues, and who takes over.

An attempt is one group of members that trains from one committed snapshot. Its phases, which follow from four fields:

(1)  stand by   no members: all stop. Whoever reports this attempt is alive and at rest, and may be chosen
(2)  form       members, not go: they load, restore and connect; all ready: go. Or one fails, or takes too long: (1)
(3)  run        go: snapshots are committed when the client stores the copies of all. One is lost, or fails: (1)
(4)  pause      a member leaves, or the group can grow: all pause after the same step; its snapshot is committed: (1)

Every event ends in ``_decide``, which compares the reports with the current attempt; no event is needed twice.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from thinpipe.train.recovery.messages import (
    BROKEN,
    CLIENT,
    FREE,
    IDLE,
    OVER,
    PAUSED,
    READY,
    Clock,
    CoordinatorAction,
    End,
    Keep,
    Notice,
    Order,
    Policy,
    Report,
    SendTo,
    SnapshotId,
)

_SETTLE_BEATS = 3  # for a silent member to answer before a spare takes its place
_MOST_FAILURES = 2  # of formations, before a member is not chosen again
_START = SnapshotId(0, 0)


class _Group(NamedTuple):
    """The members of an attempt."""

    attempt: int
    members: tuple[str, ...]
    lives: tuple[int, ...]
    cut: tuple[int, ...]


_NO_GROUP = _Group(0, (), (), ())


class _Peer:
    """A member as the coordinator knows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = self.candidate = 0  # 0: none. A candidate has to answer an order before it counts
        self.challenge = 0  # the number of that order
        self.report = Report("", name, 0, 0)
        self.heard_at = self.sent_at = 0.0
        self.lost = ""  # why it is certainly over
        self.have = _START
        self.failures = 0

    def admit(self, life: int) -> None:
        self.life, self.candidate = life, 0
        self.report = Report("", self.name, life, 0)
        self.lost, self.have, self.failures = "", _START, 0


class CoordinatorMachine:
    """The one that decides; it runs in the client's process."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._clock = Clock(2 * policy.beat_s)
        self._peers: dict[str, _Peer] = {}
        self._attempt = self._number = 0
        self._group = _NO_GROUP  # of the current attempt; members: none in stand-by
        self._former = _NO_GROUP  # the last one that had members
        self._go = self._pause = self._is_planned = False
        self._since = 0.0  # begin of the phase
        self._paused_at: float | None = None
        self._stored: dict[SnapshotId, set[str]] = {}
        self.committed = self._base = SnapshotId(0, policy.first_step)
        self._committed_by = self._base_by = _NO_GROUP
        self._cause, self._suspect, self._is_certain = "", "", False
        self._trouble_at: float | None = None
        self._end: tuple[str, int] | None = None
        self._ended_at, self._end_number = 0.0, 0
        self._notes: dict[str, str] = {}
        self.over = False  # the run has ended, and all members that can be reached have confirmed it

    def receive(self, now: float, report: Report) -> list[CoordinatorAction]:
        now = self._clock.advance(now)
        name = report.name
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(name)
        if report.run not in ("", self.policy.run):
            return []  # another run's server: silent to this one
        if report.life != peer.life and not self._answers(peer, report):
            return self._challenge(now, peer, report.life)
        if report.number <= peer.report.number:
            return []
        is_same = report[4:] == peer.report[4:]
        peer.report, peer.heard_at = report, now
        if is_same:
            return []
        actions = self._noted(peer)
        return actions + self._decide(now)

    def tick(self, now: float) -> list[CoordinatorAction]:
        now = self._clock.advance(now)
        return self._decide(now) + self._orders(now, only_due=True)

    def mirrored(self, now: float, name: str, snapshot: SnapshotId) -> list[CoordinatorAction]:
        now = self._clock.advance(now)
        former = self._former
        if snapshot.attempt != former.attempt or name not in former.members or self._base.attempt >= former.attempt:
            return []
        peer = self._peers[name]
        if snapshot > peer.have:
            peer.have = snapshot
        stored = self._stored.setdefault(snapshot, set())
        stored.add(name)
        if len(stored) < len(former.members) or snapshot <= self.committed:
            return self._orders(now)
        self.committed, self._committed_by = snapshot, former
        self._stored = {each: names for each, names in self._stored.items() if each > snapshot}
        self._cause, self._suspect, self._is_certain, self._trouble_at = "", "", False, None
        return [Keep(snapshot), *self._decide(now), *self._orders(now)]

    def mirror_failed(self, now: float, name: str, snapshot: SnapshotId, cause: str) -> list[CoordinatorAction]:
        self._clock.advance(now)
        return [Notice(f"the snapshot of step {snapshot.step} of {name} is not stored: {cause}")]

    def lost(self, now: float, name: str, life: int, cause: str) -> list[CoordinatorAction]:
        now = self._clock.advance(now)
        peer = self._peers.get(name)
        if peer is None or peer.life != life or peer.lost:
            return []
        peer.lost = cause
        return self._decide(now)

    def finished(self, now: float, cause: str = "", code: int = 0) -> list[CoordinatorAction]:
        return self._finish(self._clock.advance(now), cause, code)

    # Lives

    def _answers(self, peer: _Peer, report: Report) -> bool:
        """Return whether a new life has answered an order that was made after its first report; if so, admit it.

        Lives have no order, and a report of an earlier life may arrive late; but it cannot contain a later number.
        """
        if report.life != peer.candidate or report.heard < peer.challenge:
            return False
        peer.admit(report.life)
        return True

    def _challenge(self, now: float, peer: _Peer, life: int) -> list[CoordinatorAction]:
        order = self._order(peer)._replace(life=life, members=(), lives=(), go=False, pause=False, have=_START)
        if life != peer.candidate:
            peer.candidate, peer.challenge = life, order.number
        return [SendTo(peer.name, order)]

    # Decisions

    def _decide(self, now: float) -> list[CoordinatorAction]:
        if self._end is not None:
            return self._linger(now)
        if not self._group.members:
            return self._refined(now) + self._choose(now)
        failure = self._failure(now, self._group)
        if failure is not None:
            return self._fail(now, *failure)
        reports = [self._peers[name].report for name in self._group.members]
        if not self._go:
            if all(each.phase == READY and each.attempt == self._attempt for each in reports):
                self._go, self._since = True, now
                return [Notice(f"training from step {self._base.step}"), *self._orders(now)]
            if now - self._since > self.policy.form_s:
                return self._fail(now, *self._late(reports))
            return []
        if not self._pause:
            if any(each.leaving for each in reports) or self._can_grow(now):
                self._pause, self._paused_at = True, None
                return self._orders(now)
            return []
        return self._paused(now, reports)

    def _failure(self, now: float, group: _Group) -> tuple[str, str, bool] | None:
        """Return the failure of a group's member: cause, the member it is about, and whether that is certain."""
        found = None
        for name, life in zip(group.members, group.lives, strict=True):
            peer = self._peers[name]
            report = peer.report
            if peer.life != life or peer.lost:
                return f"{name}: {peer.lost or 'its process was restarted'}", name, True
            if report.phase in (OVER, FREE):
                return f"{name}: it has left the run", name, True
            if now - peer.heard_at > self.policy.lost_s:
                return f"{name}: no message for {self.policy.lost_s:.0f} s", name, True
            if found is None and report.phase == BROKEN and report.attempt == group.attempt:
                about = report.blames or name
                reporter = f", as {name} reports" if report.blames else ""
                found = f"{about}: {report.cause}{reporter}", about, False
        return found

    def _late(self, reports: list[Report]) -> tuple[str, str, bool]:
        late = [each.name for each in reports if each.phase != READY]
        return f"{', '.join(late)}: not ready after {self.policy.form_s:.0f} s", late[0], False

    def _fail(self, now: float, cause: str, suspect: str, is_certain: bool) -> list[CoordinatorAction]:
        """Stop the attempt because of a failure; the first cause since the last commit is kept."""
        actions: list[CoordinatorAction] = [Notice(cause)]
        if self._trouble_at is None:
            self._trouble_at = now
            self._cause, self._suspect, self._is_certain = cause, suspect, is_certain
        if not self._go:
            self._count_failures(suspect)
        return actions + self._stand_by(now, is_planned=False)

    def _count_failures(self, suspect: str) -> None:
        """Count a failed formation against the member that most of the others name."""
        reports = [self._peers[name].report for name in self._group.members]
        votes = Counter(each.blames or each.name for each in reports if each.phase == BROKEN)
        blamed = votes.most_common(1)[0][0] if votes else suspect
        if blamed in self._peers:
            self._peers[blamed].failures += 1

    def _refined(self, now: float) -> list[CoordinatorAction]:
        """Replace the first cause, seen by others, by what is known of the member itself."""
        if self._cause and not self._is_certain:
            failure = self._failure(now, self._former)
            if failure is not None and failure[2] and failure[1] == self._suspect:
                self._cause, self._is_certain = failure[0], True
                return [Notice(self._cause)]
        return []

    def _stand_by(self, now: float, *, is_planned: bool) -> list[CoordinatorAction]:
        self._attempt += 1
        self._group = _NO_GROUP
        self._go = self._pause = False
        self._is_planned, self._since = is_planned, now
        return self._orders(now) + self._choose(now)

    def _can_grow(self, now: float) -> bool:
        count = len(self._group.members) - 1
        if count >= self.policy.servers or now - self._since < _SETTLE_BEATS * self.policy.beat_s:
            return False
        spares = sum(name not in self._group.members for name in self._available(now))
        return self._size(count + spares, least=count + 1) > 0

    def _paused(self, now: float, reports: list[Report]) -> list[CoordinatorAction]:
        if all(each.phase == PAUSED and self.committed == (self._attempt, each.step) for each in reports):
            return self._stand_by(now, is_planned=True)
        if self._paused_at is None and any(each.phase == PAUSED for each in reports):
            self._paused_at = now
        if self._paused_at is not None and now - self._paused_at > self.policy.form_s:
            late = [each.name for each in reports if self._peers[each.name].have != (self._attempt, each.step)]
            name = (late or [reports[0].name])[0]
            return self._fail(now, f"{name}: its state was not transferred in {self.policy.form_s:.0f} s", name, False)
        return []

    def _available(self, now: float) -> list[str]:
        """Return the servers that may be chosen: alive, at rest in the current attempt, and without failures."""
        return [
            name
            for name, peer in self._peers.items()
            if name != CLIENT
            and peer.report.phase == IDLE
            and peer.report.attempt == self._attempt
            and not (peer.lost or peer.report.leaving)
            and peer.failures < _MOST_FAILURES
            and now - peer.heard_at <= self.policy.lost_s
        ]

    def _size(self, servers: int, *, least: int) -> int:
        """Return the largest number of servers, of those at hand, that the model can be cut for; 0 if there is none."""
        most = min(servers, self.policy.servers)
        return next((each for each in range(most, least - 1, -1) if each + 1 in self.policy.cuts), 0)

    def _choose(self, now: float) -> list[CoordinatorAction]:
        """Form the next group: the former members, spares for those that are lost, or fewer; or wait; or end."""
        policy, waited = self.policy, now - self._since
        client = self._peers.get(CLIENT)
        is_client_ready = client is not None and client.report[5:7] == (self._attempt, IDLE)
        available = self._available(now)
        size = 0
        if is_client_ready and not self._awaits(now, available):
            is_shrinking = self._former.members and (self._is_planned or waited > policy.return_s)
            size = self._size(len(available), least=policy.min_servers if is_shrinking else policy.servers)
        if size:
            return self._form(now, available, size)
        began = self._since if self._trouble_at is None else self._trouble_at
        if now - began > policy.end_s:
            missing = f"{policy.servers} servers are needed, and {len(available)} are here"
            return self._finish(now, f"{self._cause}; {missing}" if self._cause else missing, 1)
        return []

    def _awaits(self, now: float, available: list[str]) -> bool:
        """Return whether a former member may still come to rest: one that stops, or for a moment one that is silent."""
        for name, life in zip(self._former.members, self._former.lives, strict=True):
            peer = self._peers[name]
            if name in available or name == CLIENT or peer.life != life or peer.lost or peer.report.leaving:
                continue
            if peer.report.phase == OVER or peer.failures >= _MOST_FAILURES:
                continue
            answers = peer.report.attempt == self._attempt and now - peer.heard_at <= self.policy.lost_s
            settle_s = self.policy.form_s if answers else _SETTLE_BEATS * self.policy.beat_s
            if now - self._since <= settle_s:
                return True
        return False

    def _form(self, now: float, available: list[str], size: int) -> list[CoordinatorAction]:
        """Form a group: members keep their places, spares take those that are free."""
        former = self._former.members[1:]
        spares = [name for name in available if name not in former]
        places: list[str] = [name if name in available else "" for name in former]
        if size != len(places):
            places = [name for name in places if name]
        places = (places + [""] * size)[:size]
        names = [name or spares.pop(0) for name in places if name or spares]
        members = (CLIENT, *names)
        lives = tuple(self._peers[name].life for name in members)
        self._attempt += 1
        self._group = self._former = _Group(self._attempt, members, lives, self.policy.cuts[size + 1])
        self._base, self._base_by = self.committed, self._committed_by
        self._stored.clear()
        self._since = now
        return [Notice(f"forming {', '.join(members)} from step {self._base.step}"), *self._orders(now)]

    # Orders

    def _order(self, peer: _Peer) -> Order:
        self._number += 1
        group, base_by = self._group, self._base_by
        cause, code = (None, 0) if self._end is None else self._end
        return Order(
            self.policy.run,
            self._number,
            peer.life,
            self._attempt,
            group.members,
            group.lives,
            group.cut,
            self._base,
            base_by.members,
            base_by.cut,
            self._go,
            self._pause,
            self.committed,
            peer.have,
            peer.report.leaving and peer.name not in group.members,
            cause,
            code,
        )

    def _orders(self, now: float, *, only_due: bool = False) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for peer in self._peers.values():
            if peer.life and not peer.lost and not (only_due and now - peer.sent_at < self.policy.beat_s):
                peer.sent_at = now
                actions.append(SendTo(peer.name, self._order(peer)))
        return actions

    def _noted(self, peer: _Peer) -> list[CoordinatorAction]:
        note = peer.report.note
        if not note or self._notes.get(peer.name) == note:
            return []
        self._notes[peer.name] = note
        return [Notice(f"{peer.name}: {note}")]

    def _finish(self, now: float, cause: str, code: int) -> list[CoordinatorAction]:
        if self._end is not None:
            return []
        self._end, self._ended_at, self._end_number = (cause, code), now, self._number + 1
        self._group, self._go, self._pause = _NO_GROUP, False, False
        return [End(cause, code), *self._orders(now)]

    def _linger(self, now: float) -> list[CoordinatorAction]:
        """Repeat the end until all members have confirmed it, or are silent."""
        waits = any(
            each.life and not each.lost and each.report.heard < self._end_number and each.report.phase != OVER
            for each in self._peers.values()
        )
        self.over = not waits or now - self._ended_at > self.policy.lost_s
        return []
