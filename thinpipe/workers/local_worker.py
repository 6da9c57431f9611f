"""A worker's process on this machine: joins the others, calls the function, and always says how it ended."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Protocol

from thinpipe.workers.errors import Interrupted, debugging, is_effect, leave, noted_cause
from thinpipe.workers.membership import joined, set_member
from thinpipe.workers.signals import end_with_parent, raise_signals, unblock_signals


class Network(Protocol):
    """A network of our own, with a place for every worker."""

    @property
    def broken(self) -> int | None:
        """A file descriptor of the process that made it: readable when its links are gone. None: they stay."""

    def enter(self, worker: int) -> None:
        """Move this process to the place of a worker."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker is to do."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    workers: int
    network: Network | None
    backend: str | None
    patience_s: float
    folder: str  # this process's
    meeting_file: str
    ignored: frozenset[int]  # signals
    environment: dict[str, str]  # of the process that starts it, which may have changed it since the server runs


def work(job: Job, rank: int, sender: connection.Connection) -> None:
    """What a worker's process does. It always says how it ended, unless it is killed."""
    os.environ |= job.environment
    report = _Report(sender, job.folder)
    raise_signals(report.leave, job.ignored)
    unblock_signals()  # as the server has done, if it could import its part
    end_with_parent()  # the server
    threading.Thread(target=_end_with_launcher, name="thinpipe-launcher", daemon=True).start()
    backend = job.backend
    try:
        machine, local = 0, (rank, job.workers)
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # nothing listens to other machines
        if job.network is not None:
            job.network.enter(rank)  # first: threads and sockets stay where they were made
            machine = rank
            backend = backend or "gloo"  # NCCL would pass by the network, through the memory of the machine
        set_member(rank, job.workers, machine=machine, local=local, master=("127.0.0.1", "0"))
        options: dict[str, Any] = {"meeting_file": job.meeting_file, "patience_s": job.patience_s}
        with joined(backend, end=report.failed, **options):
            result = job.function(*job.args)
        report.done(result)
        report.leave(0)  # threads of gloo that still need Python would abort an ordinary exit
    except BaseException as error:
        if debugging():
            traceback.print_exc()
        code = 128 + error.number if isinstance(error, Interrupted) else getattr(error, "code", 1)
        report.failed(noted_cause(error, rank), code, is_effect(error))


class _Report:
    """The way back to the process that started this worker; the first word counts, whichever thread says it."""

    def __init__(self, sender: connection.Connection, folder: str) -> None:
        self._sender, self._folder, self._lock = sender, folder, threading.Lock()

    def done(self, result: Any) -> None:
        with self._lock:
            self._sender.send((True, result))

    def failed(self, cause: str, code: int = 1, is_effect: bool = False) -> None:
        with self._lock:
            with suppress(OSError):  # nobody is there to hear it
                self._sender.send((False, (cause, code, is_effect)))
            self.leave(code)

    def leave(self, code: int) -> None:
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():
            shutil.rmtree(self._folder, ignore_errors=True)  # nobody is there to do it
        leave(code)


def _end_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
