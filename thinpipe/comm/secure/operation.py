"""Operations: sends and receives under way."""

from __future__ import annotations

from _thread import allocate_lock

Key = tuple[int, int]  # stream and tag
# Charged for a frame in addition to its bytes, wherever memory is bounded: Python's objects for a message of a new tag
# take 1.3 kB.
FRAME_COST = 1 << 10


class Operation:
    """A send or a receive; any number of threads may wait for it."""

    __slots__ = ("_latch", "at", "done", "error", "key", "ordinal", "view", "wanted")

    def __init__(self, key: Key, ordinal: int, view: memoryview) -> None:
        self.key, self.ordinal, self.view = key, ordinal, view  # ordinal: among the messages of the key, from 0 on
        self.at = 0  # bytes sent, or received
        self.wanted = False  # announced by WANT
        self.done = False
        self.error: str | None = None
        self._latch = allocate_lock()  # a tenth of the time that an Event takes
        self._latch.acquire()

    def finish(self, error: str | None = None) -> None:
        if not self.done:
            self.error, self.view = error, memoryview(b"")
            self.done = True  # last: other threads read it without a lock
            self._latch.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it is done; return False after the timeout."""
        if not self.done:
            if not self._latch.acquire(timeout=timeout_s):
                return False
            self._latch.release()
        return True
