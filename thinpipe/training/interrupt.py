"""Ctrl-C in a worker: noted, so that all workers stop together after the step under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class InterruptedRun(KeyboardInterrupt):
    """Somebody pressed Ctrl-C; all workers have stopped at the same step."""


@contextmanager
def noted_interrupts() -> Iterator[threading.Event]:
    """Set once SIGINT has come; inside, it does nothing else. Outside the main thread signals are not ours to take."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda *_: noted.set())
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
