"""Signals that ask a worker to end, and the end of the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from thinpipe.workers.control import GRACE_S
from thinpipe.workers.errors import Interrupted

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
# Looked up ahead: also called between fork and exec, where nothing should be loaded. Linux has it.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


class Noted:
    """The first signal that came, if any."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number


class RaisedSignal(Noted):
    """The first signal is an exception in the main thread, those after it are nothing."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        first = not self.number
        super().__call__(number, frame)
        if first:
            raise Interrupted(number)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Inside, signals of ENDING wait. A process that is started inside begins so, and unblocks them when it is ready.

    Until then Python would answer them with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_signals() -> None:
    """This process is ready for them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def end_with_parent() -> None:
    """Get SIGTERM when the process that started this one was killed; torch's own SIGINT would wait for Python."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def raise_signals(leave: Callable[[int], None], ignored: frozenset[int] = frozenset()) -> None:
    """From now on a signal of ENDING raises ``Interrupted`` in the main thread of this process.

    If that does not end the process within GRACE_S, since it stands in a call that never returns to Python, a thread
    does: ``leave(exit code)``. ``ignored`` are those that the user wants ignored (nohup).
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    handler = RaisedSignal()
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN if number in ignored else handler)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while (number := os.read(read, 1)[0]) not in ENDING:
            pass
        time.sleep(GRACE_S)
        leave(128 + number)

    threading.Thread(target=watch, name="thinpipe-end-late", daemon=True).start()


@contextmanager
def noted_signals() -> Iterator[Noted]:
    """Inside, the signals that would end this worker are noted and do nothing else.

    So all workers can stop after the same step. Outside the main thread signals are not ours to take, nor are those
    that are ignored or that would end the process at once, without ``raise_signals``.
    """
    noted = Noted()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    taken = [number for number in ENDING if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, noted) for number in taken}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
