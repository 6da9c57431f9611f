"""How a run of several workers ends when it does not end well, in one line."""

from __future__ import annotations

import os
import signal
import traceback


class LinkError(RuntimeError):
    """The worker at the other end of a link is gone, or the network between is: the effect of somebody's failure."""


class ChecksumError(RuntimeError):
    """A message arrived with other bytes than it was sent with."""


class WorkerError(RuntimeError):
    """A worker failed, and the others were ended. ``code`` is the exit code that tells it to a shell."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Terminated(SystemExit):
    """This process was asked to end (SIGTERM, SIGHUP), and the workers have; the code is what shells say of it."""

    code: int


class Interrupted(KeyboardInterrupt):
    """A signal asked this worker to end, or another one, with which all stop: ``worker``; None: all were asked."""

    def __init__(self, number: int, worker: int | None = None) -> None:
        super().__init__(number)
        self.number, self.worker = number, worker


def root_of(error: BaseException) -> BaseException:
    """What an error was raised from: torch's stages wrap what happens in a module. Ours say all there is to say."""
    while error.__cause__ is not None and not isinstance(error, (LinkError, ChecksumError)):
        error = error.__cause__
    return error


def describe(error: BaseException) -> str:
    """An error in one line: its type, its first words, and where it was raised if it has none."""
    error = root_of(error)
    if isinstance(error, Interrupted):
        return f"ended by {signal.Signals(error.number).name}"
    words = " ".join(str(error).split())
    if not words:
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        words = "no words, raised at " + (f"{frame[0].filename}:{frame[0].lineno}" if frame else "an unknown place")
    if isinstance(error, MemoryError) or any(sign in words for sign in _OUT_OF_MEMORY):
        return f"out of memory: {type(error).__name__}: {words}"
    if isinstance(error, (LinkError, ChecksumError, WorkerError)):
        return words
    return f"{type(error).__name__}: {words}"


# What torch and the C++ library say; MemoryError is Python's.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc", "CUDA out of memory")


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get("THINPIPE_DEBUG", "") not in ("", "0")
