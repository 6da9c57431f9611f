"""The protocol on the client: it chooses members, stops groups, commits snapshots, and decides from which to continue.

An attempt is one group of members that trains from one committed snapshot. Its phases, which follow from three fields:

(1)  stand by   no members: all stop. A member that reports this attempt is alive and at rest, and may be chosen
(2)  form       members, not go: they load, restore and connect; all ready: go. One fails, or takes too long: (1)
(3)  run        go: a snapshot is committed when the client stores the copies of all. One fails, or is lost: (1)
(4)  pause      a member leaves, or the group can grow: all pause after the same step; its snapshot is committed: (1)

Every event ends in ``_decide``, which compares the reports with the attempt; so no event is needed a second time.
"""

from __future__ import annotations

from collections import Counter

from thinpipe.train.recovery.messages import (
    CLIENT,
    Clock,
    CoordinatorAction,
    End,
    Keep,
    Notice,
    Order,
    Phase,
    Policy,
    Report,
    SendTo,
    SnapshotId,
)
from thinpipe.train.recovery.standing import NO_FORMATION, NO_SNAPSHOT, Failure, Formation, PeerState

_SETTLE_BEATS = 3  # for members that are silent to answer, before others take their places
_FRESH_BEATS = 2  # since its last message, for which a spare is expected to answer
_MOST_FAILURES = 2  # of a member's own since a commit, before it is not chosen again
_MOST_TRIES = 20  # without a new step


class CoordinatorMachine:
    """The one that decides; it runs in the client's process. Every method is an event and returns actions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.committed = self._base = SnapshotId(0, policy.first_step)
        self.over = False  # the run has ended, and all members that can be reached have confirmed it
        self._clock = Clock(2 * policy.beat_s)
        self._actions: list[CoordinatorAction] = []
        self._peers: dict[str, PeerState] = {}
        self.attempt = self._number = 0
        self._is_changed = False  # since the last orders
        self._group = self._former = NO_FORMATION  # of this attempt, none in stand-by; and the last one that there was
        self._committed_by = self._base_by = NO_FORMATION
        self._go = self._pause = self._is_planned = False
        self._since = self._not_before = 0.0  # the begin of the phase; when a group may be formed again
        self._paused_at: float | None = None
        self._stored: dict[SnapshotId, set[str]] = {}
        self._unstored = ""  # why the client has not stored the last copy that it could not store in this attempt
        self._furthest = policy.first_step  # step that a group has completed
        self._first: Failure | None = None  # since a step was new
        self._first_at, self._tries = 0.0, 0
        self._end: tuple[str, int] | None = None
        self._ended_at, self._end_number = 0.0, 0

    def receive(self, now: float, report: Report) -> list[CoordinatorAction]:
        now = self._clock.advance(now)
        if report.run not in ("", self.policy.run):
            return []  # the server of another run: silent to this one
        peer = self._peers.get(report.name) or self._peers.setdefault(report.name, PeerState(report.name))
        if report.life != peer.life:
            if not peer.may_change(now - peer.heard_at > _SETTLE_BEATS * self.policy.beat_s):
                return []
            if not peer.admits(report):
                self._challenge(peer, report.life)
                return self._flush(now)
        before = peer.report
        if report.number <= before.number:
            return []
        peer.report, peer.heard_at = report, now
        if report[5:] == before[5:]:  # all but the numbers
            return []
        if report.note not in ("", peer.note):
            peer.note = report.note
            self._notice(f"{peer.name}: {peer.note}")
        if self._go and report.attempt == self.attempt:
            self._note_progress(now, report.step)
        self._decide(now)
        return self._flush(now)

    def tick(self, now: float) -> list[CoordinatorAction]:
        now = self._clock.advance(now)
        self._decide(now)
        return self._flush(now, is_tick=True)

    def mirrored(self, now: float, name: str, snapshot: SnapshotId) -> list[CoordinatorAction]:
        now = self._clock.advance(now)
        former = self._former
        if snapshot.attempt != former.attempt or name not in former.members or self._end is not None:
            return []
        peer = self._peers[name]
        peer.have = max(peer.have, snapshot)
        self._is_changed = True
        stored = self._stored.setdefault(snapshot, set())
        stored.add(name)
        if len(stored) == len(former.members) and snapshot > self.committed:
            self.committed, self._committed_by = snapshot, former
            self._stored = {each: names for each, names in self._stored.items() if each > snapshot}
            for each in self._peers.values():
                each.failures = 0
            self._actions.append(Keep(snapshot))
            self._decide(now)
        return self._flush(now)

    def mirror_failed(self, now: float, name: str, snapshot: SnapshotId, cause: str) -> list[CoordinatorAction]:
        self._unstored = f"the snapshot of step {snapshot.step} of {name} is not stored: {cause}"
        self._notice(self._unstored)
        return self._flush(self._clock.advance(now))

    def lost(self, now: float, name: str, life: int, cause: str) -> list[CoordinatorAction]:
        now = self._clock.advance(now)
        peer = self._peers.get(name)
        if peer is None or peer.life != life or peer.lost:
            return []
        peer.lost = cause
        self._decide(now)
        return self._flush(now)

    def finished(self, now: float, cause: str = "", code: int = 0) -> list[CoordinatorAction]:
        now = self._clock.advance(now)
        self._finish(now, cause, code)
        return self._flush(now)

    def _challenge(self, peer: PeerState, life: int) -> None:
        """Send the order that a new life has to answer before it counts."""
        order = self._order(peer)._replace(life=life, members=(), lives=(), go=False, pause=False, have=NO_SNAPSHOT)
        peer.challenge(life, order.number)
        self._actions.append(SendTo(peer.name, order))

    # Decisions

    def _decide(self, now: float) -> None:
        group = self._group
        if self._end is not None:
            self._linger(now)
        elif not group.members:
            self._refine(now)
            self._choose(now)
        elif (failure := self._failure(now, group)) is not None:
            self._fail(now, failure)
        elif not self._go:
            self._form_or_fail(now, [self._peers[name].report for name in group.members])
        elif self._pause:
            self._commit_or_fail(now, [self._peers[name].report for name in group.members])
        elif any(self._peers[name].report.leaving for name in group.members) or self._can_grow(now):
            self._pause, self._paused_at, self._is_changed = True, None, True

    def _failure(self, now: float, group: Formation) -> Failure | None:
        found = None
        for name, life in zip(group.members, group.lives, strict=True):
            peer = self._peers[name]
            report = peer.report
            if peer.life != life or peer.lost:
                return Failure(f"{name}: {peer.lost or 'its process was started again'}", name, True)
            if report.phase == Phase.OVER:
                return Failure(f"{name}: it has left the run", name, True)
            if now - peer.heard_at > self.policy.lost_s:
                return Failure(f"{name}: no message for {self.policy.lost_s:.0f} s", name, True)
            if found is None and report.phase == Phase.BROKEN and report.attempt == group.attempt:
                reporter = f", as {name} reports" if report.blames else ""
                found = Failure(f"{report.blames or name}: {report.cause}{reporter}", report.blames or name, False)
        return found

    def _note_progress(self, now: float, step: int) -> None:
        if step > self._furthest:
            self._furthest, self._first, self._tries = step, None, 0
        elif step > self._base.step:
            self._first_at = now  # steps are replayed

    def _form_or_fail(self, now: float, reports: list[Report]) -> None:
        late = [each.name for each in reports if each.phase != Phase.READY or each.attempt != self.attempt]
        if not late:
            self._go, self._since, self._is_changed = True, now, True
            self._notice(f"training from step {self._base.step}")
        elif now - self._since > self.policy.form_s:
            text = f"{', '.join(late)}: not ready after {self.policy.form_s:.0f} s"
            self._fail(now, Failure(text, next((each for each in late if each != CLIENT), CLIENT), False))

    def _commit_or_fail(self, now: float, reports: list[Report]) -> None:
        paused = [each for each in reports if each.phase == Phase.PAUSED]
        if len(paused) == len(reports) and all(self.committed == (self.attempt, each.step) for each in paused):
            self._stand_by(now, is_planned=True)
        elif paused and self._paused_at is None:
            self._paused_at = now
        elif self._paused_at is not None and now - self._paused_at > self.policy.form_s:
            late = [each.name for each in reports if self._peers[each.name].have != (self.attempt, each.step)]
            text, about = f"its state was not transferred in {self.policy.form_s:.0f} s", late[0]
            if self._unstored:
                text, about = self._unstored, CLIENT
            self._fail(now, Failure(f"{about}: {text}", about, False))

    def _fail(self, now: float, failure: Failure) -> None:
        """Stop the attempt; keep the first cause since a step was new, and count whose failure it is."""
        self._notice(failure.cause)
        if self._first is None:
            self._first, self._first_at = failure, now
        self._tries += 1
        reports = [self._peers[name].report for name in self._group.members]
        broken = [each for each in reports if each.phase == Phase.BROKEN and each.attempt == self.attempt]
        own = [each.name for each in broken if not each.blames]
        if not self._go:
            votes = Counter(each.blames or each.name for each in broken)
            own = [votes.most_common(1)[0][0] if votes else failure.about]
            self._not_before = now + _SETTLE_BEATS * self.policy.beat_s
        for name in own:
            if name in self._peers:
                self._peers[name].failures += 1
        if self._peers[CLIENT].failures >= _MOST_FAILURES:
            self._finish(now, self._first.cause, 1)
        else:
            self._stand_by(now, is_planned=False)

    def _refine(self, now: float) -> None:
        """Replace a first cause that others have reported by what is known of the member itself."""
        if self._first is not None and not self._first.is_certain:
            failure = self._failure(now, self._former)
            if failure is not None and failure.is_certain and failure.about == self._first.about:
                self._first = failure
                self._notice(failure.cause)

    def _stand_by(self, now: float, *, is_planned: bool) -> None:
        self.attempt += 1
        self._group, self._go, self._pause = NO_FORMATION, False, False
        self._is_planned, self._since, self._is_changed = is_planned, now, True

    def _can_grow(self, now: float) -> bool:
        count = len(self._group.members) - 1
        if count >= self.policy.servers or now - self._since < _SETTLE_BEATS * self.policy.beat_s:
            return False
        spares = sum(name not in self._group.members for name in self._available(now))
        return self._size(count + spares, least=count + 1) > 0

    def _available(self, now: float) -> list[str]:
        """Return the servers that may be chosen: alive, at rest in the current attempt, and not failing.

        One that fails is chosen after all where the model would be cut among fewer: its cause may have passed.
        """
        is_urgent = not self._group.members and now - self._since > self.policy.return_s
        return [
            name
            for name, peer in self._peers.items()
            if peer.report.phase == Phase.IDLE
            and peer.report.attempt == self.attempt
            and name != CLIENT
            and not (peer.lost or peer.report.leaving)
            and (peer.failures < _MOST_FAILURES or is_urgent)
            and now - peer.heard_at <= self.policy.lost_s
        ]

    def _size(self, servers: int, *, least: int) -> int:
        """Return the largest number of servers, of those at hand, that the model can be cut for; 0 if there is none."""
        most = min(servers, self.policy.servers)
        return next((each for each in range(most, least - 1, -1) if each + 1 in self.policy.cuts), 0)

    def _choose(self, now: float) -> None:
        """Form the next group: former members, spares for those that are lost, or fewer; or wait; or end the run."""
        policy, available = self.policy, self._available(now)
        is_expired = now - (self._since if self._first is None else self._first_at) > policy.end_s
        is_hopeless = self._first is not None and (is_expired or self._tries > _MOST_TRIES)
        client = self._peers.get(CLIENT)
        is_at_rest = client is not None and client.report.phase == Phase.IDLE
        is_ready = is_at_rest and now >= self._not_before and not self._awaits(now, len(available))
        if is_ready and not is_hopeless:
            can_shrink = self._is_planned or now - self._since > policy.return_s
            size = self._size(len(available), least=policy.min_servers if can_shrink else policy.servers)
            if size:
                self._form(now, available, size)
                return
        if is_expired or is_hopeless:
            missing = f"{policy.servers} servers are needed, and {len(available)} are here"
            self._finish(now, missing if self._first is None else f"{self._first.cause}; {missing}", 1)

    def _awaits(self, now: float, available: int) -> bool:
        """Return whether a member may still come to rest: one that is stopping, or one that is silent for a moment."""
        beat_s, waited = self.policy.beat_s, now - self._since
        for name, peer in self._peers.items():
            report, silent_s = peer.report, now - peer.heard_at
            is_out = peer.lost or report.leaving or report.phase == Phase.OVER or peer.failures >= _MOST_FAILURES
            if is_out or peer.life == 0 or silent_s > self.policy.lost_s:
                continue
            if report.attempt == self.attempt:
                if report.phase != Phase.IDLE and waited <= self.policy.form_s:
                    return True
            elif waited <= _SETTLE_BEATS * beat_s:
                is_former = (name, peer.life) in zip(self._former.members, self._former.lives, strict=True)
                if is_former or (available < self.policy.servers and silent_s <= _FRESH_BEATS * beat_s):
                    return True
        return False

    def _form(self, now: float, available: list[str], size: int) -> None:
        """Form a group: members keep their places, spares take those that are free."""
        former = self._former.members[1:]
        spares = [name for name in available if name not in former]
        places = [name if name in available else "" for name in former]
        if size != len(places):
            places = [name for name in places if name]
        places = (places + [""] * size)[:size]
        members = (CLIENT, *(name or spares.pop(0) for name in places))
        lives = tuple(self._peers[name].life for name in members)
        self.attempt += 1
        self._group = self._former = Formation(self.attempt, members, lives, self.policy.cuts[size + 1])
        self._base, self._base_by = self.committed, self._committed_by
        self._stored.clear()
        self._unstored = ""
        self._since, self._is_changed = now, True
        self._notice(f"forming {', '.join(members)} from step {self._base.step}")

    def _finish(self, now: float, cause: str, code: int) -> None:
        if self._end is None:
            self._group, self._go, self._pause, self._is_changed = NO_FORMATION, False, False, True
            self._end, self._ended_at, self._end_number = (cause, code), now, self._number + 1
            self._actions.append(End(cause, code))

    def _linger(self, now: float) -> None:
        waits = any(
            each.life and not each.lost and each.report.heard < self._end_number and each.report.phase != Phase.OVER
            for each in self._peers.values()
        )
        self.over = not waits or now - self._ended_at > self.policy.lost_s

    # Orders

    def _notice(self, text: str) -> None:
        self._actions.append(Notice(text))

    def _flush(self, now: float, *, is_tick: bool = False) -> list[CoordinatorAction]:
        """Return the actions of an event, with orders to all if the state has changed, or to those that are due."""
        if self._is_changed or is_tick:
            for peer in self._peers.values():
                is_due = self._is_changed or now - peer.sent_at >= self.policy.beat_s
                if is_due and peer.life and not peer.lost:
                    peer.sent_at = now
                    self._actions.append(SendTo(peer.name, self._order(peer)))
            self._is_changed = False
        actions, self._actions = self._actions, []
        return actions

    def _order(self, peer: PeerState) -> Order:
        self._number += 1
        group, base_by = self._group, self._base_by
        cause, code = (None, 0) if self._end is None else self._end
        return Order(
            run=self.policy.run,
            number=self._number,
            life=peer.life,
            attempt=self.attempt,
            members=group.members,
            lives=group.lives,
            cut=group.cut,
            base=self._base,
            base_members=base_by.members,
            base_cut=base_by.cut,
            go=self._go,
            pause=self._pause,
            committed=self.committed,
            have=peer.have,
            release=peer.report.leaving and peer.name not in group.members,
            end=cause,
            code=code,
        )
