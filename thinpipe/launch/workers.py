"""Start local workers, or join workers started elsewhere; terminate all when one fails, and report the cause.

    this process                    a server that forks                the workers
    (1)  starts workers    ------>  has imported torch once  ------>   (2) join each other, call the function
    (3)  waits for results <---------------------------------------------- and send back its result
    (4)  one fails: the others have GRACE_S to exit by themselves, then are killed
    (5)  a signal is forwarded: workers complete and save the current step, however long it takes; a second one kills

The server is Python's forkserver (``multiprocessing``): modules imported before the fork are imported once, and workers
share their memory. Pickles are used only here, between processes of one user over pipes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from thinpipe.comm.control import GRACE_S
from thinpipe.comm.errors import Interrupted, Terminated, WorkerError, debugging, is_secondary, leave, noted_cause
from thinpipe.comm.membership import PATIENCE_S, Member, joined, joined_mesh, member, print_line, set_member
from thinpipe.comm.signals import (
    ENDING,
    REPEAT_S,
    SECOND,
    RaisedSignal,
    end_with_parent,
    handled_signals,
    ignored_signals,
    raise_signals,
    unblock_signals,
)
from thinpipe.launch.forking import ensure_server, import_ahead, lives, parent_of, temporary_folder

if TYPE_CHECKING:  # needs the packages of the extra [train]
    from thinpipe.comm.secure.mesh import Mesh

_serial = itertools.count()


@dataclass
class _Worker:
    """A worker that was started, and its result or the cause of its failure."""

    rank: int
    process: Any
    results: connection.Connection
    server: int | None = None  # the process that forked it
    result: tuple[Any] | None = None
    cause: str | None = None  # why it failed
    failed_at: float = 0.0
    code: int = 1
    is_secondary: bool = False  # its failure follows from another worker's

    @property
    def ended(self) -> bool:
        return self.result is not None or self.cause is not None

    @property
    def lives(self) -> bool:
        """True if its process exists; if the server was killed, multiprocessing reports living workers as dead."""
        return lives(self.process.pid)

    def receive(self) -> None:
        """Receive the worker's result or error, or note that its process has died."""
        try:
            succeeded, report = self.results.recv() if self.results.poll() else (False, None)
        except (EOFError, OSError):
            succeeded, report = False, None
        if succeeded:
            self.result = (report,)
        elif report is not None:
            self.cause, self.code, self.is_secondary = report
        elif not self.lives:
            self.process.join(GRACE_S)
            self.cause, self.code = exit_text(self.process.exitcode)
            self.cause = f"worker {self.rank}: {self.cause}"
        self.failed_at = time.monotonic()


def run_workers(
    function: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    network: Network | None = None,
    backend: str | None = None,
    patience_s: float = PATIENCE_S,
    end: Callable[[str], Any] | None = None,
    private: Any = None,
    mesh: Mesh | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on every worker, inside a process group; return the results of the local workers.

    If this process is already a worker (torchrun, ``become_member``) it joins the others, as in ``joined``, or over a
    ``mesh``; ``end`` is then called with the cause to terminate it when another worker is silent for longer than
    ``patience_s``. Otherwise ``workers`` local workers are started: ``function`` is at the top level of a module.
    ``private`` is an additional argument for worker 0 only. In a ``network`` each worker has a place and counts as a
    machine. Ctrl-C ends all workers and raises KeyboardInterrupt here once they have ended; SIGTERM and SIGHUP raise
    ``Terminated``; a worker that fails raises ``WorkerError``.
    """
    me = member()
    if me is not None:
        _check_member(me, workers, network)
        join = partial(joined, backend) if mesh is None else partial(joined_mesh, mesh)
        membership = join(patience_s=patience_s, end=end or _end_here)
        return [_join(function, _arguments(args, private, me.rank), me.rank, membership)]
    if workers is None or workers < 1:
        raise ValueError(f"the number of workers is 1 or more, got {workers}; give it, or start this under torchrun")
    import_ahead()
    job = _Job(
        function=function,
        args=args,
        workers=workers,
        network=network,
        backend=backend,
        patience_s=patience_s,
        folder=temporary_folder(),
        store_file=str(Path(temporary_folder()) / f"store-{next(_serial)}"),
        ignored=ignored_signals(),
        environment=dict(os.environ),
    )
    with handled_signals(RaisedSignal(), lambda handler: handler is not signal.SIG_IGN) as signals:
        started: list[_Worker] = []
        try:
            for rank in range(workers):
                started.append(_start(replace(job, args=_arguments(args, private, rank)), rank))
            _await(started, None if network is None else network.broken)
        except Interrupted as error:
            _stop(started, error.number, signals)
            if error.number == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise Terminated(128 + error.number) from None
        except BaseException:
            _end(started, signal.SIGTERM)
            raise
        finally:
            Path(job.store_file).unlink(missing_ok=True)
    return [worker.result[0] for worker in started if worker.result is not None]


def _check_member(me: Member, workers: int | None, network: Network | None) -> None:
    """Raise ValueError for options that a worker that was started elsewhere cannot have."""
    if workers not in (None, me.size):
        raise ValueError(f"this is one of {me.size} workers, but {workers} were requested; leave one of them out")
    if network is not None:
        raise ValueError("workers that were started elsewhere have their network; leave the links as they are")


def _arguments(args: tuple[Any, ...], private: Any, rank: int) -> tuple[Any, ...]:
    return args if private is None or rank > 0 else (*args, private)


def run_here(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as worker 0, which joins process groups by itself; signals and errors as in ``run_workers``."""
    return _join(function, args, 0, nullcontext())


def _join(function: Callable[..., Any], args: Sequence[Any], rank: int, membership: AbstractContextManager[Any]) -> Any:
    """Call the function as a worker that was started elsewhere."""
    if threading.current_thread() is threading.main_thread():
        raise_signals(leave, ignored_signals())
    end_with_parent()
    try:
        with membership:
            return function(*args)
    except (Interrupted, ValueError):
        raise
    except Exception as error:
        if debugging():
            traceback.print_exc()
        raise WorkerError(noted_cause(error, rank), getattr(error, "code", 1)) from None


def _end_here(cause: str) -> None:
    print(f"thinpipe: {cause}", file=sys.stderr)
    leave(1)


def _start(job: _Job, rank: int) -> _Worker:
    context = multiprocessing.get_context("forkserver")
    results, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(job, rank, sender), name=f"thinpipe-worker-{rank}")
    try:
        ensure_server()  # the server may have been killed
        worker.start()
    except (EOFError, ConnectionError):
        raise WorkerError(
            "the process that starts workers was killed while it started one; start the run again", 1
        ) from None
    finally:
        sender.close()
    return _Worker(rank, worker, results, parent_of(worker.pid))


def _await(workers: Sequence[_Worker], broken: int | None) -> None:
    """Return when all have a result. When one fails, or the links between them are gone, end the others and raise."""
    while not all(worker.ended for worker in workers):
        if broken in _listen(workers, None, broken):
            _end(workers, signal.SIGTERM)
            raise WorkerError(
                "the process that forwards what workers send to each other was killed, and the links are gone; "
                "start the run again"
            )
        if any(worker.cause is not None for worker in workers):
            _end(workers, signal.SIGTERM)
            raise _error_of(workers)
    _end(workers, None)


def _listen(workers: Sequence[_Worker], seconds: float | None, also: int | None = None) -> list[Any]:
    """Wait for a message or the death of a worker, or until ``also`` is readable; return the ready objects."""
    ends: dict[Any, _Worker] = {}
    for worker in workers:
        if not worker.ended:
            ends |= {worker.results: worker, worker.process.sentinel: worker}
    ready = connection.wait([*ends, *([] if also is None else [also])], seconds)
    for each in ready:
        if each in ends and not ends[each].ended:
            ends[each].receive()
    return ready


def _end(workers: Sequence[_Worker], number: int | None) -> None:
    """Terminate all workers: send them a signal, if one is given, and kill those that remain after GRACE_S."""
    deadline = time.monotonic() + GRACE_S
    # A worker whose neighbour died usually detects that itself, immediately if it waits for it; else signal it.
    ask_at = time.monotonic() + (1.0 if any(worker.cause for worker in workers) else 0.0)
    while any(worker.lives for worker in workers):
        if number is not None and time.monotonic() >= ask_at:
            _signal(workers, number)
            number, deadline = None, time.monotonic() + GRACE_S
        if number is None and time.monotonic() >= deadline:
            _signal(workers, signal.SIGKILL)
        _listen(workers, 0.05)
        time.sleep(0.02)
    for worker in workers:
        worker.process.join(GRACE_S)
        if not worker.ended:
            worker.receive()


def _stop(workers: Sequence[_Worker], number: int, signals: RaisedSignal) -> None:
    """(5) Forward a signal, and wait until the workers have stopped, one fails, or a second signal arrives."""
    _signal(workers, number)
    began, announced = time.monotonic(), False
    while any(worker.lives for worker in workers) and not any(worker.cause for worker in workers):
        if signals.repeated:
            _signal(workers, signal.SIGKILL)
        if not announced and time.monotonic() - began > REPEAT_S:
            announced = True
            print_line(f"waiting for the workers to stop; {SECOND}")
        _listen(workers, 0.05)
        time.sleep(0.02)
    _end(workers, None)


def _signal(workers: Sequence[_Worker], number: int) -> None:
    for worker in workers:
        if worker.lives:
            try:
                os.kill(worker.process.pid, number)
            except ProcessLookupError:
                continue


def _error_of(workers: Sequence[_Worker]) -> WorkerError:
    """Return the error of a run: the first cause, then the workers that ended with it.

    Neighbours of a dead worker often fail before its death is detected. If the process that forked the workers was
    killed, they all ended with it.
    """
    if any(worker.server is not None and not lives(worker.server) for worker in workers):
        return WorkerError("the process that forks workers was killed, and all workers ended with it", 1)
    failed = sorted((w for w in workers if w.cause is not None), key=lambda w: (w.is_secondary, w.failed_at))
    first = failed[0]
    # The cause may name another worker than its sender: worker 0 reports one that has been silent.
    named = re.match(r"worker (\d+)", first.cause or "")
    culprit = int(named[1]) if named else None
    others = [str(worker.rank) for worker in workers if worker.rank != culprit]
    also = f"; worker{'s' * (len(others) > 1)} {', '.join(others)} ended with it" if others else ""
    return WorkerError(f"{first.cause}{also}", first.code)


def exit_text(code: int | None) -> tuple[str, int]:
    """Return the description of an exit code without a message, and the exit code for the run."""
    if code is not None and code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})", 1
    if code is not None and code - 128 in ENDING:
        return f"ended by {signal.Signals(code - 128).name}", code
    return f"ended without a result, exit code {code}", 1


class Network(Protocol):
    """A virtual network with a place for every worker."""

    @property
    def broken(self) -> int | None:
        """A file descriptor that is readable when the links are gone; None if they cannot fail."""

    def enter(self, worker: int) -> None:
        """Move this process to the place of a worker."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The function, arguments and environment that every worker gets."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    workers: int
    network: Network | None
    backend: str | None
    patience_s: float
    folder: str  # temporary folder of the launcher
    store_file: str
    ignored: frozenset[int]  # signals
    environment: dict[str, str]  # of the launcher, which may have changed it since the server was started


def _work(job: _Job, rank: int, sender: connection.Connection) -> None:
    """Run a worker's process. It always reports how it ended, unless it is killed."""
    os.environ |= job.environment
    report = _Report(sender, job.folder)
    raise_signals(report.leave, job.ignored, launched=True)
    unblock_signals()  # as the server has done, if its imports succeeded
    end_with_parent()  # the server
    threading.Thread(target=_end_with_launcher, name="thinpipe-launcher", daemon=True).start()
    backend = job.backend
    try:
        machine, local = 0, (rank, job.workers)
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # nothing listens to other machines
        if job.network is not None:
            job.network.enter(rank)  # first: threads and sockets stay in the network where they were created
            machine = rank
            backend = backend or "gloo"  # NCCL would bypass the network through shared memory
        set_member(rank, job.workers, machine=machine, local=local, master=("127.0.0.1", "0"))
        options: dict[str, Any] = {"store_file": job.store_file, "patience_s": job.patience_s}
        with joined(backend, end=report.failed, **options):
            result = job.function(*job.args)
        report.done(result)
        report.leave(0)  # threads of gloo that still need Python would abort an ordinary exit
    except BaseException as error:
        if debugging():
            traceback.print_exc()
        code = 128 + error.number if isinstance(error, Interrupted) else getattr(error, "code", 1)
        report.failed(noted_cause(error, rank), code, is_secondary(error))


class _Report:
    """The connection to the launcher; the first report counts, whichever thread sends it."""

    def __init__(self, sender: connection.Connection, folder: str) -> None:
        self._sender, self._folder, self._lock = sender, folder, threading.Lock()

    def done(self, result: Any) -> None:
        with self._lock:
            self._sender.send((True, result))

    def failed(self, cause: str, code: int = 1, is_secondary: bool = False) -> None:
        with self._lock:
            with suppress(OSError):  # the launcher is gone
                self._sender.send((False, (cause, code, is_secondary)))
            self.leave(code)

    def leave(self, code: int) -> None:
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():
            shutil.rmtree(self._folder, ignore_errors=True)  # the launcher, which would do it, is gone
        leave(code)


def _end_with_launcher() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
