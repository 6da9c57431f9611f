"""The process of one run on a server: it rebuilds the run from the client's offer, connects, and runs the verb.

    supervisor                                   this process, forked for the run
    assignment                 ------------->    limits, then the job: ready, or rejected in one line
    start, with who dials whom ------------->    mesh, process group, the verb's own main function
    raw connections (SCM_RIGHTS) ----------->    TLS with the key of the worker at the other end
                               <-------------    done, or failed with the cause

Messages between the two are JSON on a Unix socket that keeps their boundaries.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from thinpipe.comm.errors import Interrupted, debugging, leave, noted_cause
from thinpipe.comm.membership import become_served, joined_mesh, print_line
from thinpipe.comm.secure.handshake import HandshakeError
from thinpipe.comm.secure.identity import own_identity
from thinpipe.comm.secure.mesh import Mesh
from thinpipe.comm.signals import end_with_parent, raise_signals, unblock_signals
from thinpipe.options import flags_in_errors
from thinpipe.system.imports import forbid_imports
from thinpipe.system.sizes import limit_memory, size_text
from thinpipe.train.serve.attempts import take_part
from thinpipe.train.serve.desk import Offer, Rejected, reason_of
from thinpipe.train.serve.jobs import Job, rebuild, run_with_files
from thinpipe.train.serve.model_cache import ModelCache
from thinpipe.train.serve.model_files import PlacedFiles, fetch_files, place_files
from thinpipe.train.serve.peering import Address, Peering
from thinpipe.train.serve.roster import Dialers, Roster, parse_dialers
from thinpipe.train.worker import Outcome, run_on_worker

_MOST_BYTES = 1 << 16  # of a message between supervisor and worker
_MOST_HANDSHAKES = 64  # at a time; peers that are not in the roster never get here


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The run, and the limits of its process, as the supervisor assigns them."""

    offer: Offer
    client: Address | None  # that this server dials; None: it is dialled
    folder: Path  # of this run alone
    memory: int  # bytes
    has_gpu: bool
    threads: int | None
    cache: Path  # of model files
    disk: int  # bytes, the limit of the cache
    models: tuple[Path, ...]  # the owner's
    environment: dict[str, str]
    ignored: frozenset[int]  # signals

    @property
    def roster(self) -> Roster:
        return Roster.from_json(self.offer.run, self.offer.roster)


class Pipe:
    """One end of the Unix socket between supervisor and worker; ``send`` may be called by several threads."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    @staticmethod
    def pair() -> tuple[Pipe, Pipe]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Pipe(one), Pipe(other)

    def send(self, raw: socket.socket | None = None, *, flags: int = 0, **message: Any) -> None:
        """Send a message, with a connection if one is given; raise OSError if the other process has ended."""
        socket.send_fds(self.end, [json.dumps(message).encode()], [] if raw is None else [raw.fileno()], flags)

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None if the other process has ended, or after the timeout."""
        self.end.settimeout(timeout_s)
        found = self.receive_connection()
        self.end.settimeout(None)
        return None if found is None else found[0]

    def receive_connection(self) -> tuple[dict[str, Any], socket.socket | None] | None:
        """Return the next message, and the connection that came with it; None if the other process has ended."""
        try:
            data, files, _, _ = socket.recv_fds(self.end, _MOST_BYTES, 1)
        except OSError:
            return None
        return (json.loads(data), socket.socket(fileno=files[0]) if files else None) if data else None


def serve_run(assignment: Assignment, end: socket.socket) -> None:
    """Take part in one run, in a process of its own; never returns."""
    os.environ |= assignment.environment
    report = _Report(Pipe(end), assignment.folder)
    raise_signals(report.leave, assignment.ignored, launched=True)
    unblock_signals()
    end_with_parent()  # the server that forks
    rank = assignment.offer.worker
    try:
        with flags_in_errors():
            outcome = _run(assignment, report)
        report.done(outcome)
    except Rejected as error:
        report.failed(reject=reason_of(error))
    except BaseException as error:
        if debugging():
            traceback.print_exc()
        code = 128 + error.number if isinstance(error, Interrupted) else getattr(error, "code", 1)
        report.failed(cause=noted_cause(error, rank), code=code)


def _run(assignment: Assignment, report: _Report) -> Outcome:
    offer, roster = assignment.offer, assignment.roster
    forbid_imports("a server runs no code that the client names")
    os.chdir(assignment.folder)
    _limit(assignment.memory, by_kernel=not assignment.has_gpu)
    placed, job = prepare(assignment)
    arrivals = Arrivals(report.pipe)
    report.pipe.send(ready=True)
    if job.recovers:
        return take_part(assignment, report, arrivals, (placed, job), prepare)
    become_served(offer.worker, len(roster.entries))
    mesh = Mesh(offer.worker, len(roster.entries), patience_s=offer.patience_s, report=print_line)
    peering = Peering(roster, offer.worker, own_identity(), mesh)
    peering.add_pairs(arrivals.wait_for_start(roster), assignment.client)
    arrivals.give_to(peering.arrived)
    mesh.start()

    def end(cause: str) -> None:
        report.failed(cause=cause, code=1)

    exchange = partial(fetch_files, placed)
    with joined_mesh(mesh, patience_s=offer.patience_s, end=end):
        return run_on_worker(run_with_files, job.settings, job.main, exchange, *job.arguments)


def prepare(assignment: Assignment) -> tuple[PlacedFiles, Job]:
    """Return the folders and the job of this server; raise Rejected, in one line, for an offer that is not possible."""
    offer = assignment.offer
    try:
        cache = ModelCache(assignment.cache, assignment.disk)
        placed = place_files(offer.files, cache, assignment.models, worker=offer.worker)
        return placed, rebuild(offer.verb, offer.settings, offer.options, placed, assignment.threads)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        what = "" if isinstance(error, ValueError) else f"not a run of this version: {type(error).__name__} "
        raise Rejected(f"{what}{error}") from None


def _limit(memory: int, *, by_kernel: bool) -> None:
    try:
        limit_memory(memory, by_kernel=by_kernel)
    except (OSError, ValueError, LookupError) as error:
        raise Rejected(f"the limit of {size_text(memory)} cannot be set on the server: {error}") from None


class Arrivals:
    """The receiver of what the supervisor sends: the start of the run, and connections of other workers."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.take_order: Callable[[Any], None] = lambda order: None
        self.orphaned: Callable[[], Any] = partial(os.kill, os.getpid(), signal.SIGTERM)
        self._started = threading.Event()
        self._dialers: Any = None
        self._take: Callable[[bytes, socket.socket], Any] | None = None
        self._taken = threading.Event()
        self._busy = threading.Semaphore(_MOST_HANDSHAKES)
        threading.Thread(target=self._read, name="thinpipe-arrivals", daemon=True).start()

    def wait_for_start(self, roster: Roster) -> Dialers:
        self._started.wait()
        return parse_dialers(self._dialers, roster)

    def give_to(self, take: Callable[[bytes, socket.socket], Any]) -> None:
        self._take = take
        self._taken.set()

    def _read(self) -> None:
        while (received := self._pipe.receive_connection()) is not None:
            message, raw = received
            if "order" in message:
                self.take_order(message["order"])
            elif "start" in message:
                self._dialers = message["start"]
                self._started.set()
            elif raw is not None and self._busy.acquire(blocking=False):
                arguments = (bytes.fromhex(message["route"]), raw)
                threading.Thread(
                    target=self._authenticate, args=arguments, name="thinpipe-arrival", daemon=True
                ).start()
            elif raw is not None:
                raw.close()
        self.orphaned()  # the supervisor has ended

    def _authenticate(self, route: bytes, raw: socket.socket) -> None:
        try:
            self._taken.wait()
            assert self._take is not None
            if not self._take(route, raw):
                raw.close()
        except (HandshakeError, OSError) as error:
            print_line(f"a connection of another worker was rejected: {error}")
        finally:
            self._busy.release()


class _Report:
    """How this process ends, for the supervisor; the first report counts, whichever thread sends it."""

    def __init__(self, pipe: Pipe, folder: Path) -> None:
        self.pipe, self._folder, self._lock = pipe, folder, threading.Lock()

    def done(self, outcome: Outcome) -> None:
        with self._lock:
            self._send(done=outcome.message, code=outcome.code)
            self.leave(0)

    def failed(self, **message: Any) -> None:
        with self._lock:
            self._send(**message)
            self.leave(message.get("code", 2))

    def leave(self, code: int) -> None:
        with suppress(OSError):
            os.chdir("/")
            shutil.rmtree(self._folder, ignore_errors=True)
        leave(code)

    def _send(self, **message: Any) -> None:
        with suppress(OSError):  # the supervisor is gone
            self.pipe.send(**message)
