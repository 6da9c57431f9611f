"""The protocol on one worker: it follows the orders of the coordinator and reports its state.

Every method is an event and returns the actions for the driver, in order. Events that name an attempt other than the
current one are ignored: they are late.
"""

from __future__ import annotations

from thinpipe.train.recovery.messages import (
    Clock,
    End,
    FormGroup,
    Keep,
    MemberAction,
    Mirror,
    Order,
    Pause,
    Phase,
    Report,
    RequestPause,
    RunFrom,
    Send,
    SnapshotId,
    Stop,
    Take,
)

_REPEAT_BEATS = 5  # before a transfer that the client has not acknowledged is asked for again


class MemberMachine:
    """One worker's side of recovery; ``life`` differs in every process that has the same name."""

    def __init__(self, name: str, life: int, *, every: int, beat_s: float = 1.0, patience_s: float = 60.0) -> None:
        self.name, self.life, self.every = name, life, every
        self._beat_s, self._patience_s = beat_s, patience_s
        self._clock = Clock(2 * beat_s)
        self.run, self.phase, self.attempt, self.step = "", Phase.FREE, 0, 0
        self._order: Order | None = None
        self._number = 0
        self._formed_attempt = 0  # whose training may be in progress in the driver; 0: none
        self._heard_at = self._sent_at = self._mirrored_at = 0.0
        self._leaving_at: float | None = None
        self._asked_to_pause = False
        self._kept = SnapshotId(0, 0)
        self._owed: SnapshotId | None = None  # taken, or being taken, and not yet stored by the client
        self._is_taken = False
        self._cause = self._blames = self._note = ""

    def admits(self, run: str, attempt: int, name: str, life: int) -> bool:
        """Return whether a peer may connect: only a member of the same attempt, in the life that was chosen."""
        order = self._order
        if order is None or self.phase not in (Phase.FORMING, Phase.READY, Phase.RUNNING, Phase.PAUSED):
            return False
        return (run, attempt) == (self.run, self.attempt) and (name, life) in zip(
            order.members, order.lives, strict=True
        )

    def receive(self, now: float, order: Order) -> list[MemberAction]:
        now = self._clock.advance(now)
        if self.phase == Phase.OVER or order.life != self.life or self.run not in ("", order.run):
            return []
        if self._order is not None and order.number <= self._order.number:
            return []
        self._heard_at = now
        self._order = order
        self.run = order.run
        if order.end is not None:
            return self._end(order.end, order.code)
        actions: list[MemberAction] = []
        is_new = order.attempt > self.attempt or self.phase == Phase.FREE
        if is_new:
            actions += self._follow(order)
        if order.committed > self._kept and order.committed.attempt > 0:
            self._kept = order.committed
            actions.append(Keep(order.committed))
        if self._owed is not None and order.have >= self._owed:
            self._owed = None
        if self.attempt == order.attempt:
            if order.go and self.phase == Phase.READY:
                self.phase = Phase.RUNNING
                actions.append(RunFrom(self.attempt, order.base.step))
                is_new = True
            if order.pause and self.phase == Phase.RUNNING and not self._asked_to_pause:
                self._asked_to_pause = True
                actions.append(RequestPause(self.attempt))
        if order.release and self._leaving_at is not None:
            return actions + self._end("", 0)
        if is_new:
            actions.append(self._report(now))
        return actions

    def tick(self, now: float) -> list[MemberAction]:
        now = self._clock.advance(now)
        if self.phase == Phase.OVER:
            return []
        if self.phase != Phase.FREE and now - self._heard_at > self._patience_s:
            return self._end(f"no message from the client for {self._patience_s:.0f} s", 1)
        if self._leaving_at is not None and (self.phase == Phase.FREE or now - self._leaving_at > self._patience_s):
            return self._end("", 0)
        actions: list[MemberAction] = []
        if self._owed is not None and self._is_taken and now - self._mirrored_at > _REPEAT_BEATS * self._beat_s:
            self._mirrored_at = now
            actions.append(Mirror(self._owed))
        if now - self._sent_at >= self._beat_s or self._number == 0:
            actions.append(self._report(now))
        return actions

    def stopped(self, now: float, attempt: int) -> list[MemberAction]:
        now = self._clock.advance(now)
        if attempt != self._formed_attempt or self.phase != Phase.STOPPING:
            return []
        self._formed_attempt = 0
        assert self._order is not None
        return [*self._follow(self._order), self._report(now)]

    def formed(self, now: float, attempt: int) -> list[MemberAction]:
        now = self._clock.advance(now)
        if attempt != self.attempt or self.phase != Phase.FORMING:
            return []
        self.phase = Phase.READY
        return [self._report(now)]

    def form_failed(self, now: float, attempt: int, cause: str, blames: str = "") -> list[MemberAction]:
        return self.broken(now, attempt, cause, blames)

    def broken(self, now: float, attempt: int, cause: str, blames: str = "") -> list[MemberAction]:
        now = self._clock.advance(now)
        if attempt != self.attempt or self.phase not in (Phase.FORMING, Phase.READY, Phase.RUNNING, Phase.PAUSED):
            return []
        self.phase, self._cause, self._blames = Phase.BROKEN, cause, blames
        return [self._report(now)]

    def step_done(self, now: float, attempt: int, step: int, *, paused: bool = False) -> list[MemberAction]:
        now = self._clock.advance(now)
        if attempt != self.attempt or self.phase != Phase.RUNNING:
            return []
        self.step = step
        actions: list[MemberAction] = []
        if paused or (step % self.every == 0 and self._owed is None):
            self._owed, self._is_taken = SnapshotId(attempt, step), False
            actions.append(Take(self._owed))
        if paused:
            self.phase = Phase.PAUSED
            actions += [Pause(attempt), self._report(now)]
        return actions

    def taken(self, now: float, snapshot: SnapshotId) -> list[MemberAction]:
        now = self._clock.advance(now)
        if snapshot != self._owed or self.phase == Phase.OVER:
            return []
        self._is_taken, self._mirrored_at = True, now
        return [Mirror(snapshot)]

    def take_failed(self, now: float, snapshot: SnapshotId, cause: str) -> list[MemberAction]:
        now = self._clock.advance(now)
        if snapshot != self._owed or self.phase == Phase.OVER:
            return []
        self._owed, self._note = None, f"no snapshot of step {snapshot.step}: {cause}"
        return [self._report(now)]

    def leave(self, now: float) -> list[MemberAction]:
        """Leave the run after the current step, once the state of this worker is stored by the client."""
        now = self._clock.advance(now)
        if self.phase == Phase.OVER or self._leaving_at is not None:
            return []
        self._leaving_at = now
        return self._end("", 0) if self.phase == Phase.FREE else [self._report(now)]

    def _follow(self, order: Order) -> list[MemberAction]:
        """Stop what another attempt does; then take part in that of the order, or stand by."""
        if self._formed_attempt:
            is_stopping = self.phase == Phase.STOPPING
            self.phase, self.attempt = Phase.STOPPING, order.attempt
            return [] if is_stopping else [Stop(self._formed_attempt)]
        self.attempt, self.step = order.attempt, order.base.step
        self._asked_to_pause = False
        self._cause = self._blames = ""
        if self.name not in order.members:
            self.phase = Phase.IDLE
            return []
        self.phase, self._formed_attempt, self._owed = Phase.FORMING, order.attempt, None
        worker = order.members.index(self.name)
        if order.lives[worker] != self.life:
            self.phase, self._formed_attempt = Phase.IDLE, 0
            return []
        group = order.members, order.lives, order.cut, order.base, order.base_members, order.base_cut
        return [FormGroup(order.attempt, worker, *group)]

    def _report(self, now: float) -> Send:
        self._number += 1
        self._sent_at = now
        heard = 0 if self._order is None else self._order.number
        return Send(
            Report(
                self.run,
                self.name,
                self.life,
                self._number,
                heard,
                self.attempt,
                self.phase,
                self.step,
                self._leaving_at is not None,
                self._cause,
                self._blames,
                self._note,
            )
        )

    def _end(self, cause: str, code: int) -> list[MemberAction]:
        self.phase = Phase.OVER
        return [self._report(self._clock.now), End(cause, code)]
