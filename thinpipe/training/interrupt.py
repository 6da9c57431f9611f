"""Ctrl-C and SIGTERM in a worker: noted, so that all workers stop together after the step under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class InterruptedRun(KeyboardInterrupt):
    """Somebody pressed Ctrl-C, or asked the run to end; all workers have stopped at the same step."""


@contextmanager
def noted_interrupts() -> Iterator[threading.Event]:
    """Set once SIGINT has come; inside, it does nothing else. Outside the main thread signals are not ours to take.

    SIGTERM likewise, but only where our launcher has seen to it that a worker ends even if it never gets to look:
    torchrun's workers die of it at once, as torchrun expects.
    """
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    taken = [signal.SIGINT]
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        taken.append(signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: noted.set()) for number in taken}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
