"""Small real runs with servers: `thinpipe serve` on each, behind a proxy that a fault can disturb."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.faults.runs import PATIENCE_S, How, Machine, Run, Setting
from tests.train.serve.proxy import Proxy, target_of, through

_TICKET = re.compile(r"thinpipe://\S+")
_LIMIT_S = 120  # for a ticket, on a busy machine


class RunWithServers(Run):
    """A client, machine 0, and servers from 1 on.

    ``serve``: the client connects to the servers; ``listen``: they connect to the client. All connections to server n,
    or from it, pass ``proxy(n)``.
    """

    def __init__(self, folder: Path, setting: Setting, how: How, *, forked: bool = True) -> None:
        super().__init__(folder, setting, how, forked=forked)
        self.absent: int | None = None  # a server that joins later, if at all
        self._proxies: list[Proxy] = []
        self._ticket = ""

    @property
    def _servers(self) -> range:
        return range(1, self.setting.workers)

    def proxy(self, server: int) -> Proxy:
        return self._proxies[server - 1]

    def start(
        self, *options: str, env: Mapping[str, str] | None = None, limits: Callable[[], None] | None = None
    ) -> None:
        self._start(*self.setting.options(), *options, limits=limits)

    def resume(self, *options: str) -> Machine:
        anew = [*self.setting.options(), "--save", str(self.saved)]
        self._start(*(["--resume", str(self.saved)] if self.steps() else anew), *options)
        return self.machines[0]

    def again(self) -> RunWithServers:
        return RunWithServers(self.folder, self.setting, self.how)

    def join(self) -> None:
        """Let the absent server join."""
        assert self.absent is not None
        if self.how == "serve":
            self.proxy(self.absent).set_down(False)
        else:
            self._serve(self.absent, through(self.proxy(self.absent), self._ticket))

    def _start(self, *options: str, limits: Callable[[], None] | None = None) -> None:
        if self.how == "serve":
            tickets = []
            for server in self._servers:
                ticket = _ticket_of(self._serve(server, "--listen", "127.0.0.1:0"))
                self._proxies.append(Proxy(target_of(ticket)))
                tickets.append(through(self._proxies[-1], ticket))
            if self.absent is not None:
                self.proxy(self.absent).set_down(True)
            client = self._client("--servers", ",".join(tickets), *options, limits=limits)
            self.machines = [client, *self.machines[:-1]]
            return
        where = ("--listen", "127.0.0.1:0", "--workers", str(self.setting.workers))
        self._ticket = _ticket_of(self._client(*where, *options, limits=limits))
        self._proxies = [Proxy(target_of(self._ticket)) for _ in self._servers]
        for server in self._servers:
            if server != self.absent:
                self._serve(server, through(self.proxy(server), self._ticket))

    def _client(self, *options: str, limits: Callable[[], None] | None) -> Machine:
        train = ["-m", "thinpipe", "train", "--patience", str(PATIENCE_S)]
        return self.command(*train, *options, env=self._home(0), limits=limits)

    def _serve(self, number: int, *options: str) -> Machine:
        own = ["--threads", "1", "--once", "--name", f"server-{number}"]
        return self.command("-m", "thinpipe", "serve", *options, *own, env=self._home(number))

    def _home(self, number: int) -> dict[str, str]:
        return {
            "THINPIPE_HOME": str(self.folder / f"key-{number}"),
            "XDG_CACHE_HOME": str(self.cache(number)),
            "HF_HUB_OFFLINE": "1",
        }

    def cache(self, server: int) -> Path:
        return self.folder / f"cache-{server}"

    def worker(self, number: int) -> int | None:
        if number >= len(self.machines):
            return None
        if number == 0:
            return self.machines[0].pid
        workers = self.machines[number].workers()
        return workers[0].pid if workers else None

    def wait(self, limit_s: float) -> bool:
        """Wait for all machines; a server whose client has ended before the run would wait for the next client."""
        until = time.monotonic() + limit_s
        while not self.is_over and time.monotonic() < until:
            if self.machines[0].is_over:
                self._dismiss()
            time.sleep(0.05)
        return self.is_over

    def _dismiss(self) -> None:
        for number, machine in enumerate(self.machines):
            waits = not machine.is_over and "starts: worker" not in machine.stderr()
            if machine.is_server and waits and number not in self.dismissed:
                self.dismissed.add(number)
                machine.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        super().end()
        for each in self._proxies:
            each.close()


def _ticket_of(machine: Machine) -> str:
    """Wait for the ticket that a command prints."""
    until = time.monotonic() + _LIMIT_S
    while not (found := _TICKET.search(machine.stdout() + machine.stderr())):
        if machine.is_over or time.monotonic() > until:
            raise RuntimeError(f"no ticket was printed:\n{machine.stdout()}\n{machine.stderr()}")
        time.sleep(0.02)
    return found[0]


def new_run(folder: Path, setting: Setting, how: How, *, forked: bool) -> Run:
    if how in ("serve", "listen"):
        return RunWithServers(folder, setting, how, forked=forked)
    return Run(folder, setting, how, forked=forked)
