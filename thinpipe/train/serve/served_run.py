"""One run on a server: its process, what its owner allows it, and how it ends."""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinpipe.comm.signals import ignored_signals
from thinpipe.launch.forking import ensure_server
from thinpipe.launch.workers import exit_text
from thinpipe.options import flags_in_errors
from thinpipe.system.sizes import free_bytes, size_text, status_bytes
from thinpipe.train.serve.desk import Desk, Gone, Offer, Rejected, ServerFacts
from thinpipe.train.serve.peering import Address
from thinpipe.train.serve.roster import Roster
from thinpipe.train.serve.server_worker import Assignment, Pipe, serve_run

_READY_S = 120.0  # for a worker to be forked, and to rebuild a run: imports on a busy machine
_POLL_S = 0.05  # also the delay of orders and reports of recovery
_GRACE_S = 5.0  # for a process to end after a signal
_LEAST_PATIENCE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Limits that the owner of a server has set."""

    facts: ServerFacts
    memory: int | None  # bytes of a run; None: what is free when it starts
    threads: int | None
    cache: Path
    disk: int  # bytes of model files in the cache
    models: tuple[Path, ...]  # folders that runs may read, with folders of models
    runs: int
    patience_s: float  # the longest that a run waits for a lost connection, whatever the client asks for


@dataclass
class ServedRun:
    """One run, from its offer to the end of its process."""

    offer: Offer
    roster: Roster
    client: str
    folder: Path  # its own, below the cache
    owner: Owner
    process: Any = None
    pipe: Pipe | None = None
    started: bool = False
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.routes = self.roster.routes(self.offer.worker)
        self._memory = self._memory_before = 0  # the latter is shared with the process that forked it
        self.desks: queue.SimpleQueue[Desk] = queue.SimpleQueue()  # on which the client has connected again
        self._reports: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of recovery, for the client

    @property
    def text(self) -> str:
        return f"run {self.offer.run[:8]} ({self.offer.verb}) of {self.client}"

    def fork(self, client: Address | None) -> None:
        """Start the process, which checks the offer; raise Rejected if that is not possible here."""
        self.folder.mkdir(parents=True, mode=0o700)
        owner = self.owner
        self._memory = owner.memory or free_bytes()
        patience_s = min(max(self.offer.patience_s, _LEAST_PATIENCE_S), owner.patience_s)
        assignment = Assignment(
            offer=replace(self.offer, patience_s=patience_s),
            client=client,
            folder=self.folder,
            memory=self._memory,
            has_gpu=owner.facts.device == "cuda",
            threads=owner.threads,
            cache=owner.cache / "models",
            disk=owner.disk,
            models=owner.models,
            environment=dict(os.environ),
            ignored=ignored_signals(),
        )
        self.pipe, theirs = Pipe.pair()
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=serve_run, args=(assignment, theirs.end), name="thinpipe-serve")
        with flags_in_errors():
            ensure_server()
            process.start()
        self.process = process
        theirs.end.close()
        message = self.pipe.receive(_READY_S) or {}
        if "ready" not in message:
            reason = message.get("reject") or message.get("cause") or "its process did not start"
            raise Rejected(f"{owner.facts.name}: {reason}")
        self._memory_before = self._used_bytes()

    def wait(self, desk: Desk) -> tuple[dict[str, Any], Desk | None]:
        """Wait until the process has ended; return how, and the desk if the client is still connected to one.

        A client that is gone is the worker's to find out: it may come back over another network.
        """
        assert self.pipe is not None
        ended, found, excess = threading.Event(), list[dict[str, Any]](), 0
        connected: Desk | None = desk

        def receive() -> None:
            assert self.pipe is not None
            while True:
                message = self.pipe.receive() or {}
                if "routes" in message:
                    self.routes = {bytes.fromhex(route): 0 for route in message["routes"]}
                elif "report" in message:
                    self._reports.put(message["report"])
                else:
                    break
            found.append(message)
            ended.set()

        threading.Thread(target=receive, name="thinpipe-serve-end", daemon=True).start()
        while not ended.wait(_POLL_S):
            if not excess and self._used_bytes() > self._memory:
                excess = self._used_bytes()
                self.process.kill()
            connected = self._exchange(connected)
        self.process.join(_GRACE_S)
        return self._end(found[0], excess), connected

    def _exchange(self, desk: Desk | None) -> Desk | None:
        """Forward what the client and the process of the run send; return the desk, None if it is closed."""
        assert self.pipe is not None
        if not self.desks.empty():
            if desk is not None:
                desk.close()
            desk = self.desks.get()
        try:
            while not self._reports.empty():
                report = self._reports.get()
                if desk is not None:
                    desk.send(report=report)
            while desk is not None and (message := desk.poll()) is not None:
                if "cancel" in message:
                    self.process.terminate()
                elif "order" in message:
                    with suppress(BlockingIOError):  # its process is frozen, and the next order is as good
                        self.pipe.send(order=message["order"], flags=socket.MSG_DONTWAIT)
        except (Gone, Rejected):
            assert desk is not None
            desk.close()
            return None
        except OSError:  # the process has ended
            return desk
        return desk

    def clear(self) -> None:
        """End the process if it is still there, and remove what it has left."""
        if self.process is not None:
            for end in (self.process.terminate, self.process.kill):
                if self.process.is_alive():
                    end()
                    self.process.join(_GRACE_S)
        if self.pipe is not None:
            self.pipe.end.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _used_bytes(self) -> int:
        """Return the memory of the process since it began; 0 if it has ended."""
        with suppress(OSError, LookupError):
            return status_bytes("RssAnon", self.process.pid) - self._memory_before
        return 0

    def _end(self, message: dict[str, Any], excess: int) -> dict[str, Any]:
        """Return what the worker has reported about its end, or else what is known of it."""
        worker, name = self.offer.worker, self.owner.facts.name
        if excess:
            used = f"it used {size_text(excess)} of memory, and {name} allows {size_text(self._memory)}"
            return {"cause": f"worker {worker} was ended: {used}; take smaller batches or more workers", "code": 1}
        if not message:
            how, code = exit_text(self.process.exitcode)
            return {"cause": f"worker {worker}: {how} on {name}", "code": code}
        return message
