"""The driver of a member: it carries out the actions of its machine, in a process that takes part in several attempts.

The main thread trains; other threads bring orders and ticks. The machine and everything that follows from its actions
are guarded by one lock. An attempt is stopped by ending its mesh: what waits for a peer raises LinkError.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, TypeVar

from thinpipe.comm.errors import LinkError, is_secondary, noted_cause
from thinpipe.comm.membership import print_line
from thinpipe.comm.secure.mesh import Mesh
from thinpipe.train.engines.world import World
from thinpipe.train.recovery.keeper import Keeper, Snapshot
from thinpipe.train.recovery.member import MemberMachine
from thinpipe.train.recovery.messages import (
    CLIENT,
    End,
    FormGroup,
    Keep,
    MemberAction,
    Mirror,
    Notice,
    Order,
    Pause,
    Report,
    RequestPause,
    RunFrom,
    Send,
    SnapshotId,
    Stop,
    Take,
)
from thinpipe.train.recovery.mirror import SnapshotReceiver, SnapshotSender

BEAT_S, TICK_S = 1.0, 0.25
Store = Callable[[str, SnapshotId], None]  # called when the client has a member's snapshot
Outcome = TypeVar("Outcome")


class Stopped(LinkError):
    """This attempt is over; the process waits for the next one."""


class MemberDriver:
    """One process of a run; the methods of ``Pilot`` are called by the training loop.

    ``send`` sends a report to the coordinator, and ``stored`` is called on the client.
    """

    def __init__(
        self,
        machine: MemberMachine,
        send: Callable[[Report], None],
        *,
        stored: Store | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        self.keeper = Keeper(self)
        self._machine, self._send, self._stored = machine, send, stored
        self._lock = lock or threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._todo: deque[MemberAction] = deque()
        self._is_busy = False
        self._forms: queue.SimpleQueue[FormGroup | End] = queue.SimpleQueue()
        self._form: FormGroup | None = None  # that the main thread carries out, or is about to
        self._mesh: Mesh | None = None
        self._stopping = 0  # the attempt that is to be stopped
        self._runs = self._pauses = False
        self._take: Callable[[], Snapshot] | None = None
        self._mirror: SnapshotSender | None = None
        self._times: list[tuple[str, float]] = []  # of a recovery, on the client
        self._furthest = 0  # step
        self.received_bytes = 0  # of snapshots, on the client
        self.ended: End | None = None

    # Events from any thread

    def receive(self, order: Order) -> None:
        self._event(self._machine.receive, order)

    def tick(self) -> None:
        self._event(self._machine.tick)

    def _event(self, method: Callable[..., list[MemberAction]], *arguments: Any, **options: Any) -> None:
        with self._lock:
            self._todo.extend(method(time.monotonic(), *arguments, **options))
            if self._is_busy:
                return
            self._is_busy = True
            try:
                while self._todo:
                    self._carry_out(self._todo.popleft())
            finally:
                self._is_busy = False

    def _carry_out(self, action: MemberAction) -> None:
        match action:
            case Send(report):
                self._send(report)
            case FormGroup():
                self.mark("to stop and choose")
                self._form, self._runs, self._pauses = action, False, False
                self._forms.put(action)
            case RunFrom():
                self.mark("for the others")
                self._runs = True
            case RequestPause():
                self._pauses = True
            case Take(snapshot):
                self._take_snapshot(snapshot)
            case Mirror(snapshot):
                self._send_snapshot(snapshot)
            case Keep(snapshot):
                self.keeper.forget_before(snapshot)
            case Stop(attempt):
                self._stop(attempt)
            case End():
                self.ended = self.ended or action
                self._forms.put(action)
                self._abort(action.cause or "the run is over")
            case Notice(text):
                print_line(text)
            case Pause():
                pass  # ``step_done`` waits
        self._changed.notify_all()

    def _take_snapshot(self, snapshot: SnapshotId) -> None:
        assert self._take is not None
        try:
            self.keeper.own[snapshot] = self._take()
        except (MemoryError, RuntimeError) as error:  # torch's own for too little memory
            self._event(self._machine.take_failed, snapshot, str(error))
        else:
            self._event(self._machine.taken, snapshot)

    def _send_snapshot(self, snapshot: SnapshotId) -> None:
        found = self.keeper.own.get(snapshot)
        if found is None:
            return
        if self._stored is not None:
            self._stored(CLIENT, snapshot)
        elif self._mirror is not None:
            self._mirror.offer(snapshot, found.state, hurries=self._pauses)

    def mark(self, part: str) -> None:
        """Note the end of a part of a recovery."""
        if self._times:
            self._times.append((part, time.monotonic()))

    def _begin_recovery(self) -> None:
        if self._stored is not None and self._runs and not self._times:
            self._times = [("", time.monotonic())]

    def _report_recovery(self, step: int) -> None:
        self.mark("for a step")
        parts = [f"{now - before:.2f} s {part}" for (_, before), (part, now) in pairwise(self._times)]
        total = self._times[-1][1] - self._times[0][1]
        replayed = max(0, self._furthest - step + 1)
        done = f"step {step} is done {total:.2f} s after the last group stopped"
        print_line(f"{done}: {', '.join(parts)}; replayed steps: {replayed}")
        self._times = []

    def _stop(self, attempt: int) -> None:
        self._begin_recovery()
        if self._form is None or self._form.attempt != attempt:
            self._event(self._machine.stopped, attempt)
            return
        self._stopping = attempt
        self._abort("this attempt is over")

    def _abort(self, cause: str) -> None:
        if self._mesh is not None:
            self._mesh.abort(cause)

    # The main thread

    def run(self, attempt: Callable[[FormGroup], Outcome]) -> Outcome | End:
        """Call ``attempt`` for every group that this process takes part in, until the run has ended.

        Return the result of the last one on the client; on a server how the run has ended.
        """
        while True:
            action = self._forms.get()
            if isinstance(action, End) or self.ended is not None:
                return self.ended or action  # type: ignore[return-value]
            result = self._attempt(attempt, action)
            if result is not None and self._stored is not None:
                return result

    def _attempt(self, attempt: Callable[[FormGroup], Outcome], form: FormGroup) -> Outcome | None:
        """Take part in one attempt; return None if it was stopped or has lost a worker."""
        self.keeper.base = form.base if form.base.attempt else None
        try:
            self._check()
            return attempt(form)
        except BaseException as error:
            with self._lock:
                if self._stopping != form.attempt and self.ended is None:
                    if not is_secondary(error):
                        raise
                    self._begin_recovery()
                    cause = noted_cause(error, form.worker)
                    self._event(self._machine.broken, form.attempt, cause, _blamed(cause, form))
            return None
        finally:
            self._rest()

    def _rest(self) -> None:
        with self._lock:
            form, self._form = self._form, None
            self._close_mesh()
            if form is not None and self._stopping == form.attempt:
                self._event(self._machine.stopped, form.attempt)

    def _close_mesh(self) -> None:
        self._mesh = None
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None

    def use(self, mesh: Mesh) -> None:
        """Set the mesh of this attempt before it is started, so that it can be ended."""
        with self._lock:
            self._check()
            self._mesh = mesh

    def _check(self) -> None:
        if self.ended is not None or (self._form is not None and self._stopping == self._form.attempt):
            raise Stopped("this attempt is over")

    # Pilot

    def formed(self, world: World, expected_bytes: list[int]) -> None:
        with self._lock:
            self._check()
            form, mesh = self._form, self._mesh
            assert form is not None
            assert mesh is not None
            if self._stored is None:
                self._mirror = SnapshotSender(mesh)
            else:
                self._receive_snapshots(form, mesh, expected_bytes)
            self.mark("to build and load")
            self._event(self._machine.formed, form.attempt)
            while not self._runs:
                self._check()
                self._changed.wait()
            self._check()

    def _receive_snapshots(self, form: FormGroup, mesh: Mesh, expected_bytes: list[int]) -> None:
        for worker, name in enumerate(form.members):
            if worker == 0:
                continue

            def store(key: tuple[int, int], state: Any, name: str = name) -> None:
                assert self._stored is not None
                snapshot = SnapshotId(*key)
                with self._lock:
                    self.keeper.others.setdefault(snapshot, {})[name] = state
                    self.received_bytes += sum(each.nbytes for each in state.values())
                    self._stored(name, snapshot)

            SnapshotReceiver(mesh.channel(worker), 2 * expected_bytes[worker] + (64 << 20), store)

    def step_done(self, step: int, take: Callable[[], Snapshot], *, paused: bool) -> None:
        with self._lock:
            self._check()
            assert self._form is not None
            self._take = take
            if self._times:
                self._report_recovery(step)
            self._furthest = max(self._furthest, step)
            self._event(self._machine.step_done, self._form.attempt, step, paused=paused)
            self._take = None
            while paused:
                self._check()
                self._changed.wait()

    def wants_pause(self) -> bool:
        return self._pauses

    def leave(self, number: int) -> None:
        self._event(self._machine.leave)


def _blamed(cause: str, form: FormGroup) -> str:
    """Return the member that a cause names by its number; an empty string if it names none, or this one."""
    found = re.match(r"worker (\d+)", cause)
    worker = int(found[1]) if found else form.worker
    return form.members[worker] if worker != form.worker and worker < len(form.members) else ""


def ticking(tick: Callable[[], None], until: threading.Event) -> threading.Thread:
    """Start a thread that calls ``tick`` every TICK_S until an event is set."""

    def run() -> None:
        while not until.wait(TICK_S):
            with suppress(OSError):
                tick()

    thread = threading.Thread(target=run, name="thinpipe-recovery", daemon=True)
    thread.start()
    return thread
