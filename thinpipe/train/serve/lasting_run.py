"""The client's side of a run that continues without a lost server: the coordinator, and a line to every server.

main thread         attempts of worker 0, as the driver of its member gets them
thinpipe-recovery   ticks
thinpipe-line-N     the desk of server N: orders to it, reports and the end of its process from it. A desk that
                    breaks is dialled again; a server that has no process of this run is offered it again
"""

from __future__ import annotations

import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from thinpipe.comm.errors import WorkerError
from thinpipe.comm.membership import become_served, joined_mesh, print_line
from thinpipe.comm.secure.handshake import HandshakeError
from thinpipe.comm.secure.mesh import Mesh
from thinpipe.options import OptionError
from thinpipe.system.sanitize import one_line
from thinpipe.system.sizes import size_text
from thinpipe.train.recovery.coordinator import CoordinatorMachine
from thinpipe.train.recovery.driver import BEAT_S, MemberDriver, ticking
from thinpipe.train.recovery.member import MemberMachine
from thinpipe.train.recovery.messages import (
    CLIENT,
    CoordinatorAction,
    End,
    FormGroup,
    Keep,
    Notice,
    Order,
    Policy,
    Report,
    SendTo,
    SnapshotId,
    message_json,
    parse_message,
)
from thinpipe.train.serve.attempts import Formation, member_name
from thinpipe.train.serve.desk import Desk, Gone, Offer, Rejected
from thinpipe.train.serve.jobs import Job, run_with_files
from thinpipe.train.serve.model_files import ClientFiles, serve_files
from thinpipe.train.serve.peering import Peering
from thinpipe.train.serve.roster import Dialers, Roster, dialers_of
from thinpipe.train.settings import Settings
from thinpipe.train.worker import Outcome, run_on_worker

_POLL_MS = 50.0
_START_S = 3.0  # for all servers to report, so that those named first are chosen
_AGAIN_S = 1.0  # between attempts to reach a server
_REFUSED_S = 3.0  # after which a port that is closed shows that the server has ended
_END_FACTOR = 10  # times the patience: without progress for so long after a loss the run ends


class Coordination:
    """The coordinator of a run, and the lines that carry its orders; all of it is guarded by one lock."""

    def __init__(self, policy: Policy) -> None:
        self.lock = threading.RLock()
        self.machine = CoordinatorMachine(policy)
        self.lines: dict[str, Callable[[Order], None]] = {}  # by the member's name
        self.keep: Callable[[SnapshotId], None] = lambda snapshot: None
        self.ended: End | None = None
        self._todo: list[CoordinatorAction] = []
        self._is_busy = False

    def event(self, method: Callable[..., list[CoordinatorAction]], *arguments: Any) -> None:
        with self.lock:
            self._todo.extend(method(time.monotonic(), *arguments))
            if self._is_busy:
                return
            self._is_busy = True
            try:
                while self._todo:
                    self._carry_out(self._todo.pop(0))
            finally:
                self._is_busy = False

    def _carry_out(self, action: CoordinatorAction) -> None:
        match action:
            case SendTo(name, order):
                if name in self.lines:
                    self.lines[name](order)
            case Keep(snapshot):
                self.keep(snapshot)
            case Notice(text):
                print_line(text)
            case End():
                self.ended = self.ended or action


class Line:
    """The connection to the desk of one server, in a thread of its own."""

    def __init__(self, name: str, desk: Desk, coordination: Coordination, rejoin: Callable[[Line], Desk]) -> None:
        self.name, self.life = name, 0
        self._desk, self._coordination, self._rejoin = desk, coordination, rejoin
        self._order: Order | None = None  # the newest, not sent yet
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinpipe-line", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, order: Order) -> None:
        self._order = order

    def close(self) -> None:
        self.closed.set()
        self._thread.join(2)
        self._desk.close()

    def lost(self, cause: str) -> None:
        """Report that the process of the run there is certainly over."""
        if self.life:
            life, self.life = self.life, 0
            self._coordination.event(self._coordination.machine.lost, self.name, life, one_line(cause)[:1000])

    def _run(self) -> None:
        while not self.closed.is_set():
            try:
                self._serve()
            except (Gone, Rejected, ValueError):
                self._desk.close()
                self._reconnect()

    def _serve(self) -> None:
        ready = select.poll()
        ready.register(self._desk.fileno(), select.POLLIN)
        while not self.closed.is_set():
            order, self._order = self._order, None
            if order is not None:
                self._desk.send(order=message_json(order))
            ready.poll(_POLL_MS)
            while (message := self._desk.poll()) is not None:
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if "report" in message:
            report = parse_message(Report, message["report"])
            if report.name != self.name:
                raise Rejected(f"it sends the report of {report.name}")
            self.life = report.life
            self._coordination.event(self._coordination.machine.receive, report)
        elif "end" in message:
            end = message["end"] if isinstance(message["end"], dict) else {}
            self.lost(str(end.get("cause") or end.get("done") or "its process has ended"))
            if self._coordination.ended is not None:
                self.closed.set()
            raise Gone("the run has ended there")

    def _reconnect(self) -> None:
        refused_at = None
        while not self.closed.is_set():
            try:
                self._desk = self._rejoin(self)
                return
            except HandshakeError as error:
                now = time.monotonic()
                refused = isinstance(error.__context__, ConnectionRefusedError)
                refused_at = (refused_at or now) if refused else None
                if refused_at is not None and now - refused_at > _REFUSED_S:
                    self.lost("nothing listens at its address: the server has ended")
            except (Gone, Rejected, WorkerError):  # busy with another run, or of another version now
                pass
            self.closed.wait(_AGAIN_S)


class LastingRun:
    """One run of the client, over all attempts."""

    def __init__(self, servers: Any, met: Sequence[Any], job: Job, files: ClientFiles, patience_s: float) -> None:
        self._servers, self._met, self._job, self._files = servers, met, job, files
        self._patience_s = patience_s
        running = job.arguments[0]
        wanted = servers.count
        fewest = min(running.min_servers or wanted, wanted)
        self._policy = Policy(
            run=secrets.token_hex(8),
            servers=wanted,
            min_servers=fewest,
            cuts={count + 1: (count + 1,) for count in range(fewest, wanted + 1)},
            beat_s=BEAT_S,
            lost_s=patience_s,
            return_s=patience_s,
            end_s=_END_FACTOR * patience_s,
        )
        self._coordination = Coordination(self._policy)
        machine = MemberMachine(
            CLIENT, secrets.randbits(62) + 1, every=running.mirror_every, beat_s=BEAT_S, patience_s=patience_s
        )
        coordination = self._coordination
        self._driver = MemberDriver(
            machine,
            partial(coordination.event, coordination.machine.receive),
            stored=partial(coordination.event, coordination.machine.mirrored),
            lock=coordination.lock,
        )
        coordination.lines[CLIENT] = self._driver.receive
        coordination.keep = self._driver.keeper.forget_before

    def run(self, roster: Roster, dialers: Dialers, offers: Sequence[Offer]) -> Outcome:
        """Run to the end; ``offers``: one for each server."""
        self._roster, self._dialers = roster, dialers
        lines, ended = [], threading.Event()
        for server, offer in zip(self._met, offers, strict=True):
            rejoin = partial(self._rejoin, server, offer)
            line = Line(member_name(roster, server.worker), server.desk, self._coordination, rejoin)
            self._coordination.lines[line.name] = line.send
            lines.append(line)
        for line in lines:  # in this order servers are chosen: those named first before spares
            self._coordination.event(self._coordination.machine.receive, Report("", line.name, 0, 0))
        for line in lines:
            line.start()
        until = time.monotonic() + _START_S
        while not all(line.life for line in lines) and time.monotonic() < until:
            time.sleep(_POLL_MS / 1e3)
        ticking(self._tick, ended)
        coordination = self._coordination
        try:
            result = self._driver.run(self._attempt)
            outcome = Outcome(result.code, result.cause) if isinstance(result, End) else result
            coordination.event(coordination.machine.finished, outcome.message, outcome.code)
            until = time.monotonic() + self._patience_s
            while not coordination.machine.over and time.monotonic() < until:
                time.sleep(_POLL_MS / 1e3)
            time.sleep(2 * _POLL_MS / 1e3)  # for the last orders
        except BaseException as error:
            coordination.event(coordination.machine.finished, f"worker 0: {one_line(str(error))[:500]}", 1)
            time.sleep(4 * _POLL_MS / 1e3)
            raise
        finally:
            ended.set()
            for line in lines:
                line.close()
            self._driver.keeper.close()
        print_line(f"servers have sent {size_text(self._driver.received_bytes)} of snapshots")
        if isinstance(result, End) and result.code:
            raise WorkerError(result.cause, result.code)
        return outcome

    def _tick(self) -> None:
        self._driver.tick()
        self._coordination.event(self._coordination.machine.tick)

    def _rejoin(self, server: Any, offer: Offer, line: Line) -> Desk:
        """Return a desk of a server that takes part in this run, by the process that it has or by a new one."""
        desk = self._servers.dial_again(server)
        try:
            if desk.ask(self._patience_s, rejoin=self._roster.run).get("rejoined") is not True:
                line.lost("its process is gone")
                self._servers.offer_again(desk, offer, self._dialers, self._patience_s)
        except BaseException:
            desk.close()
            raise
        return desk

    def _attempt(self, form: FormGroup) -> Outcome:
        formation = Formation(self._roster, form)
        dialers = dialers_of(formation.numbers, self._dialers)
        with ExitStack() as stack:
            mesh = Mesh(0, len(form.members), patience_s=self._patience_s, report=print_line)
            stack.callback(mesh.abort, "this attempt is over")
            peering = Peering(formation.roster, 0, self._servers.identity, mesh)
            peering.add_pairs(dialers, None, dials_servers=True)
            members = [self._met[number - 1] for number in formation.numbers[1:]]
            self._servers.relay(formation.roster, dialers, members, peering, stack)
            self._driver.use(mesh)
            mesh.start()
            self._driver.mark("to connect")
            become_served(0, len(form.members))
            job = self._job
            assert isinstance(job.settings, Settings)
            arguments = (job.main, partial(serve_files, self._files), *job.arguments, self._driver.keeper)
            with joined_mesh(mesh, patience_s=self._patience_s, end=mesh.abort, again=True):
                return run_on_worker(run_with_files, formation.settings(job.settings), *arguments)


def check_lasting(job: Job, devices: Sequence[str]) -> None:
    """Raise OptionError for options that do not go together with recovery. ``devices``: of the servers."""
    running, settings = job.arguments[0], job.settings
    for name in ("trace", "capture"):
        if getattr(running, name) is not None:
            raise OptionError(f"{{{name}}} is about one group of workers: leave it out, or {{mirror_every}}")
    if len(set(settings.devices)) > 1:
        raise OptionError("servers take each other's places: leave out {device}, or name one, with {mirror_every}")
