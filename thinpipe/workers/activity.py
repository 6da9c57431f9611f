"""What this worker is doing right now; its heartbeat tells the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Activity:
    """Written by the main thread, read by the heartbeat's: single values, so that no lock is needed."""

    step: int = 0  # of training; 0 before the first
    doing: str = "starting"
    waiting: bool = False  # for another worker
    done: int = 0  # goes up with everything that is finished

    def note(self, doing: str, step: int | None = None) -> None:
        self.doing = doing
        self.done += 1
        if step is not None:
            self.step = step

    def status(self) -> dict[str, Any]:
        """What a heartbeat says. CPU time tells a worker that computes from one that waits inside of torch.

        The main thread's: those of gloo can spin on a connection that broke in the middle of a message.
        """
        return {
            "step": self.step,
            "doing": self.doing,
            "waiting": self.waiting,
            "done": self.done,
            "cpu_s": time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0)),
        }


ACTIVITY = Activity()  # of this process


@contextmanager
def waiting() -> Iterator[None]:
    """Around a call that ends when another worker has done its part."""
    ACTIVITY.waiting = True
    try:
        yield
    finally:
        ACTIVITY.waiting = False
        ACTIVITY.done += 1
