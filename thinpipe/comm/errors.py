"""Errors of a run of several workers, and their one-line descriptions."""

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
    """A message was corrupted in transit: its checksum does not match."""


class WorkerError(RuntimeError):
    """A worker failed, and the others were terminated. ``code`` is the exit code of the process."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Terminated(SystemExit):
    """This process got SIGTERM or SIGHUP, and its workers have ended; the code is 128 + signal, as in shells."""

    code: int


class Interrupted(KeyboardInterrupt):
    """A signal requested the end of this worker."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StoppedTogether(Interrupted):
    """A signal to one worker, or to all (None), stopped all workers after the same step."""

    def __init__(self, number: int, worker: int | None) -> None:
        super().__init__(number)
        self.worker = worker


def ended_by(number: int) -> str:
    """Return the text for a signal that ended a process."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def leave(code: int) -> NoReturn:
    """Exit this process immediately. Threads of torch that wait for a lost peer would abort an ordinary exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed by the shell
                stream.flush()
        except BrokenPipeError:
            continue  # the reader has closed the pipe
        except OSError as error:
            code = code or print_os_error(error)
    os._exit(code)


def print_os_error(error: OSError) -> int:
    """Print an OSError, such as a write to a full disk, in one line; return the exit code."""
    with suppress(OSError):
        os.write(2, f"thinpipe: {describe(error)}\n".encode())
    return 1


def root_of(error: BaseException) -> BaseException:
    """Return the root cause of an error: torch's stages wrap errors of modules. Errors of links are not unwrapped."""
    while error.__cause__ is not None and not isinstance(error, (LinkError, ChecksumError)):
        error = error.__cause__
    return error


def is_secondary(error: BaseException) -> bool:
    """Return True if an error is only the consequence of a lost worker."""
    error = root_of(error)
    lost = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER)
    return isinstance(error, LinkError) or lost


def describe(error: BaseException) -> str:
    """Return an error in one line: its type and its message, or where it was raised if it has no message."""
    error = root_of(error)
    if isinstance(error, Interrupted):
        return f"ended by {signal.Signals(error.number).name}"
    message = " ".join(str(error).split())
    if not message:
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        message = "no message, raised at " + (f"{frame[0].filename}:{frame[0].lineno}" if frame else "an unknown place")
    if isinstance(error, MemoryError) or any(sign in message for sign in _OUT_OF_MEMORY):
        return f"out of memory: {type(error).__name__}: {message}"
    if isinstance(error, (LinkError, ChecksumError, WorkerError)):
        return message
    return f"{type(error).__name__}: {message}"


def note_cause(error: BaseException, cause: str) -> None:
    """Attach to an error the cause that was sent to all workers."""
    error.__dict__["cause"] = cause


def noted_cause(error: BaseException, rank: int) -> str:
    """Return the attached cause, or the error itself if no cause was sent."""
    return str(error.__dict__.get("cause") or f"worker {rank}: {describe(error)}")


# Messages of gloo in calls of torch that are not wrapped, such as those of DistributedDataParallel.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer")

# Messages of torch and the C++ library; MemoryError is Python's.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc", "CUDA out of memory")


def debugging() -> bool:
    """Return True if tracebacks are to be printed (THINPIPE_DEBUG)."""
    return os.environ.get("THINPIPE_DEBUG", "") not in ("", "0")
