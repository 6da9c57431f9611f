"""How a run of several workers ends when it does not end well, in one line."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import NoReturn


class LinkError(RuntimeError):
    """The worker at the other end of a link, or the network to it, has failed."""


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
    """A signal asked this worker to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StoppedTogether(Interrupted):
    """A signal asked one worker to end, or all of them (None), and all have stopped after the same step."""

    def __init__(self, number: int, worker: int | None) -> None:
        super().__init__(number)
        self.worker = worker


def ended_by(number: int) -> str:
    """A signal that ended a process, in the words of its one line."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def leave(code: int) -> NoReturn:
    """End this process at once. Threads of torch that wait for a lost peer would abort an ordinary exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed by the shell
                stream.flush()
        except BrokenPipeError:
            continue  # nobody reads any more
        except OSError as error:
            code = code or tell_system(error)
    os._exit(code)


def tell_system(error: OSError) -> int:
    """What the system refused, such as a table on a full disk, in one line; returns the exit code."""
    with suppress(OSError):
        os.write(2, f"thinpipe: {describe(error)}\n".encode())
    return 1


def root_of(error: BaseException) -> BaseException:
    """What an error was raised from: torch's stages wrap what happens in a module. Ours say all there is to say."""
    while error.__cause__ is not None and not isinstance(error, (LinkError, ChecksumError)):
        error = error.__cause__
    return error


def is_effect(error: BaseException) -> bool:
    """Whether an error only says that another worker is gone."""
    error = root_of(error)
    lost = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER)
    return isinstance(error, LinkError) or lost


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


def note_cause(error: BaseException, cause: str) -> None:
    """Keep with an error why its worker ended, as all workers were told."""
    error.__dict__["cause"] = cause


def noted_cause(error: BaseException, rank: int) -> str:
    """That, or the error itself where nobody could be told."""
    return str(error.__dict__.get("cause") or f"worker {rank}: {describe(error)}")


# What gloo says in calls of torch that are not wrapped, such as those of DistributedDataParallel.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer")

# What torch and the C++ library say; MemoryError is Python's.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc", "CUDA out of memory")


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get("THINPIPE_DEBUG", "") not in ("", "0")
