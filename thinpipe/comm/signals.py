"""Signals that stop a worker, and the death of the process that started it.

first signal    in training   all workers complete the current step and save it
                elsewhere     ``Interrupted`` is raised; the process exits within GRACE_S
second signal   anywhere      the process exits immediately
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, TypeVar

from thinpipe.comm.control import ACTIVITY, GRACE_S
from thinpipe.comm.errors import Interrupted
from thinpipe.comm.membership import print_line

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Signals this close together count as one: `timeout` and terminals signal a process and its group.
REPEAT_S = 1.0
# A stopping run is stuck if it makes no progress for this long, or for STUCK_STEPS times its longest step.
STUCK_S, STUCK_STEPS = 120.0, 3
SECOND = "a second signal ends the run at once"

_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
# Looked up ahead: also called between fork and exec, where nothing should be loaded. Linux only.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


class Noted:
    """A handler that keeps the number of the first signal, and whether another one followed."""

    def __init__(self) -> None:
        self.number = 0
        self.repeated = False
        self._first_at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._first_at = number, time.monotonic()
        elif time.monotonic() - self._first_at > REPEAT_S:
            self.repeated = True


class RaisedSignal(Noted):
    """A handler that raises ``Interrupted`` in the main thread for the first signal, and nothing for later ones."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        first = not self.number
        super().__call__(number, frame)
        if first:
            raise Interrupted(number)


Handler = TypeVar("Handler", bound=Noted)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals of ENDING. A process started inside inherits this, and unblocks them when it is ready.

    Before that, Python would print a traceback on a signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_signals() -> None:
    """Unblock the signals of ENDING when this process is ready for them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def end_with_parent() -> None:
    """Request SIGTERM for this process when its parent is killed; torch's own SIGINT would wait for Python."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def raise_signals(
    leave: Callable[[int], None], ignored: frozenset[int] = frozenset(), *, launched: bool = False
) -> None:
    """Raise ``Interrupted`` in the main thread on a signal of ENDING, from now on.

    The main thread may be in a call that never returns to Python. Therefore a thread calls ``leave(exit code)`` if the
    process has not exited in time: see ``_watch``.

    Args:
        ignored: signals to ignore (nohup).
        launched: whether a launcher started this worker: it forwards each signal, and kills the worker on a second one.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    handler = RaisedSignal()
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN if number in ignored else handler)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        leave(128 + _watch(read, launched))

    threading.Thread(target=watch, name="thinpipe-end-late", daemon=True).start()


def _watch(pipe: int, launched: bool) -> int:
    """Wait for a signal, and then until the process must be ended; return the signal's number.

    That is after GRACE_S; in training, where the current step is to be saved, after a long time without progress; and
    on a second signal.
    """
    while (number := os.read(pipe, 1)[0]) not in ENDING:
        pass
    stops_after_step = not isinstance(signal.getsignal(number), RaisedSignal)
    began = finished_at = time.monotonic()
    finished, announced = ACTIVITY.done, launched or not stops_after_step
    while True:
        readable, _, _ = select.select([pipe], [], [], _POLL_S)
        now = time.monotonic()
        if readable and os.read(pipe, 1)[0] in ENDING and now - began > REPEAT_S and not launched:
            return number
        if not announced and now - began > REPEAT_S:
            announced = True
            print_line(f"stopping after the current step; {SECOND}")
        if stops_after_step and ACTIVITY.done != finished:
            finished, finished_at = ACTIVITY.done, now
        patience_s = max(STUCK_S, STUCK_STEPS * ACTIVITY.longest_step_s) if stops_after_step else GRACE_S
        if now - finished_at > patience_s:
            return number


def ignored_signals() -> frozenset[int]:
    """Return the signals of ENDING that this process ignores (nohup)."""
    return frozenset(number for number in ENDING if signal.getsignal(number) is signal.SIG_IGN)


@contextmanager
def handled_signals(handler: Handler, takes: Callable[[Any], bool]) -> Iterator[Handler]:
    """Handle the signals of ENDING whose present handler ``takes`` accepts; none outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    numbers = [number for number in ENDING if takes(signal.getsignal(number))]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield handler
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def noted_signals() -> AbstractContextManager[Noted]:
    """Record the signals that would end this worker instead of raising them.

    So all workers can stop after the same step. Signals that are ignored, or that would end the process immediately
    without ``raise_signals``, keep their handlers.
    """
    return handled_signals(Noted(), callable)
