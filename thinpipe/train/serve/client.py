"""The client's side of a run with servers: it finds them, offers the run, relays, and learns how their workers end.

(1)  dial the ticket of every server; or listen, print a ticket, and wait for as many servers
(2)  ask for facts; choose the devices; offer the run to all; a rejection ends it on all, in one line
(3)  find out which servers reach each other; relay the others
(4)  start; the mesh of worker 0 is in this process
(5)  watch the desks: a worker that was killed ends the run at once, not after the patience
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from thinpipe.comm.addresses import address_and_port
from thinpipe.comm.control import GRACE_S
from thinpipe.comm.errors import LinkError, WorkerError
from thinpipe.comm.membership import print_line
from thinpipe.comm.secure.gate import DESK
from thinpipe.comm.secure.handshake import HandshakeError, connect, dial
from thinpipe.comm.secure.identity import own_identity
from thinpipe.comm.secure.mesh import Mesh
from thinpipe.comm.secure.peers import KnownPeers
from thinpipe.comm.secure.ticket import Ticket
from thinpipe.options import OptionError, flags_in_errors
from thinpipe.system.sanitize import one_line
from thinpipe.train.serve.desk import (
    PROTOCOL,
    Desk,
    Gone,
    Offer,
    Rejected,
    ServerFacts,
    facts_json,
    parse_facts,
    version_difference,
)
from thinpipe.train.serve.jobs import Job, run_with_files
from thinpipe.train.serve.lasting_run import LastingRun, check_lasting
from thinpipe.train.serve.lobby import JOIN, Lobby, parse_address
from thinpipe.train.serve.model_files import ClientFiles, check_settings, serve_files
from thinpipe.train.serve.peering import CONNECT_S, Peering
from thinpipe.train.serve.relay import Relay
from thinpipe.train.serve.roster import Dialers, Roster, RosterEntry, dialers_json
from thinpipe.train.versions import versions
from thinpipe.train.worker import Outcome

_ANSWER_S = 150.0  # for the answer to an offer: the server forks and imports
_AGAIN_S = 0.5


@dataclass
class MetServer:
    """One server: its number, its desk, and what it has said."""

    worker: int
    desk: Desk
    fingerprint: bytes
    facts: ServerFacts
    address: tuple[str, int] | None  # where the client dials it


class Servers:
    """The servers of one run, as the options of the client name them: by their tickets, or by this client's address."""

    def __init__(
        self, tickets: Sequence[Ticket], lobby: Lobby | None, count: int, *, chooses_devices: bool = True
    ) -> None:
        self._tickets, self._lobby, self.count = tickets, lobby, count
        self._chooses_devices = chooses_devices
        self.identity = own_identity()

    @contextmanager
    def joined(self, job: Job, patience_s: float) -> Iterator[tuple[Mesh, Job]]:
        """Agree with all servers on a run; yield its mesh, which has started, and the job of this worker."""
        with flags_in_errors(), ExitStack() as stack:
            files = _files_of(job)
            if self._lobby is not None:
                stack.callback(self._lobby.close)
                self._lobby.start()
                self._invite(self._lobby.ticket)
            servers = self._meet(patience_s)
            for each in servers:
                stack.callback(each.desk.close)
            with _rejections(servers):
                job = self._with_devices(job, servers)
                roster, dialers, _ = self._offer(job, files, servers, patience_s)
                mesh = Mesh(0, len(servers) + 1, patience_s=patience_s, report=print_line)
                peering = Peering(roster, 0, self.identity, mesh)
                peering.add_pairs(dialers, None, dials_servers=self._lobby is None)
                self.relay(roster, dialers, servers, peering, stack)
                for each in servers:
                    each.desk.send(start=dialers_json(dialers))
            watch = _Watch(servers, mesh)
            stack.callback(watch.close)
            try:
                mesh.start()
            except LinkError as error:  # a server has ended meanwhile, or no connection passes a firewall
                mesh.close(GRACE_S)
                raise WorkerError(str(error)) from None
            exchange = partial(serve_files, files)
            yield mesh, Job(run_with_files, job.settings, (job.main, exchange, *job.arguments))

    def run(self, job: Job, patience_s: float) -> Outcome:
        """Run a job that continues without a lost server; servers that are not needed at first are spares."""
        with flags_in_errors(), ExitStack() as stack:
            files = _files_of(job)
            servers = self._meet(patience_s)
            for each in servers:
                stack.callback(each.desk.close)
            with _rejections(servers):
                check_lasting(job, [each.facts.device for each in servers])
                roster, dialers, offers = self._offer(job, files, servers, patience_s)
                for each in servers:
                    each.desk.send(start=dialers_json(dialers))
            return LastingRun(self, servers, job, files, patience_s).run(roster, dialers, offers)

    def dial_again(self, server: MetServer) -> Desk:
        """Return a new connection to the desk of a server that this client has met; raise OSError if there is none."""
        host, port = server.address or ("", 0)
        raw = connect(host, port, DESK, timeout_s=CONNECT_S)
        return Desk(dial(raw, self.identity, server.fingerprint, deadline_s=CONNECT_S), server.desk.peer)

    def offer_again(self, desk: Desk, offer: Offer, dialers: Dialers, patience_s: float) -> None:
        """Offer a run to a server that has lost it; raise Rejected or ValueError if it cannot take it."""
        different = version_difference(offer, parse_facts(desk.ask(patience_s, facts=PROTOCOL).get("facts")))
        if different is not None:
            raise Rejected(f"versions differ: {different}")
        desk.send(offer=facts_json(offer))
        if "accept" not in desk.receive(_ANSWER_S):
            raise Rejected(f"{desk.peer} answers out of order")
        desk.send(start=dialers_json(dialers))

    def _invite(self, ticket: Ticket) -> None:
        times = "once" if self.count == 1 else f"on each of {self.count} machines"
        print_line(f"waiting for {self.count} server{'s' * (self.count > 1)}; type {times}:")
        print_line(f"  thinpipe serve {ticket}")

    def _meet(self, patience_s: float) -> list[MetServer]:
        """Return all servers with their facts, by number."""
        found: list[tuple[Desk, bytes, tuple[str, int] | None]]
        if self._lobby is not None:
            found = [(*each, None) for each in self._lobby.wait(JOIN * patience_s)]
        else:
            found = [(self._dial(each, patience_s), each.fingerprint, (each.host, each.port)) for each in self._tickets]
        servers = []
        for worker, (desk, fingerprint, address) in enumerate(found, 1):
            desk.peer = f"server {worker} ({desk.peer})" if self._lobby is None else desk.peer
            try:
                facts = parse_facts(desk.ask(patience_s, facts=PROTOCOL).get("facts"))
            except (Gone, Rejected) as error:
                raise WorkerError(f"{desk.peer}: {error}", code=2) from None
            except ValueError as error:
                raise WorkerError(f"{desk.peer} is of another version of thinpipe: {error}", code=2) from None
            facts = replace(facts, name=one_line(facts.name)[:60])
            desk.peer = f"worker {worker} ({facts.name})"
            if self._lobby is not None:
                with suppress(OSError, ValueError):  # a full disk does not end a run
                    KnownPeers().remember(fingerprint, facts.name)
            print_line(f"{desk.peer} is here: {facts.device}, torch {one_line(facts.torch)[:30]}")
            servers.append(MetServer(worker, desk, fingerprint, facts, address))
        return servers

    def _dial(self, ticket: Ticket, patience_s: float) -> Desk:
        """Connect to the desk of a server; wait while it does not answer, up to the patience."""
        until, announced = time.monotonic() + patience_s, False
        while True:
            try:
                raw = connect(ticket.host, ticket.port, DESK, timeout_s=min(CONNECT_S, patience_s))
                channel = dial(raw, self.identity, ticket.fingerprint, secret=ticket.secret, deadline_s=CONNECT_S)
            except HandshakeError as error:
                if error.final or time.monotonic() > until:
                    raise WorkerError(str(error), code=2 if error.final else 1) from None
                if not announced:
                    print_line(f"{error}; trying again for {patience_s:.0f} s")
                announced = True
                time.sleep(_AGAIN_S)
            else:
                return Desk(channel, address_and_port(ticket.host, ticket.port))

    def _with_devices(self, job: Job, servers: Sequence[MetServer]) -> Job:
        """Return the job with a device for every worker: that of each server, unless the user has named them."""
        settings: Any = job.settings
        if self._chooses_devices:
            devices = [settings.devices[0], *(each.facts.device for each in servers)]
            named_once = devices[0] if len(set(devices)) == 1 else ",".join(devices)
            settings = replace(settings, device=named_once)
        for each in servers:
            if settings.devices[each.worker] == "cuda" and each.facts.device != "cuda":
                raise OptionError(
                    f"{{device}} {settings.device} wants a GPU on {each.desk.peer}, which offers {each.facts.device}"
                )
        return job._replace(settings=settings)

    def _offer(
        self, job: Job, files: ClientFiles, servers: Sequence[MetServer], patience_s: float
    ) -> tuple[Roster, Dialers, list[Offer]]:
        """Offer the run to all servers; return the roster, who dials whom, the offers."""
        here, run = versions(), secrets.token_hex(16)
        own, chosen = self.identity.fingerprint.hex(), job.settings.devices[0]
        entries, offers = [RosterEntry(name=socket.gethostname(), fingerprint=own, device=chosen)], []
        for each in servers:
            host, port = each.address or announced_address(each.facts.address)
            device = each.facts.device if self._chooses_devices else chosen
            facts = {"name": each.facts.name, "fingerprint": each.fingerprint.hex(), "device": device}
            entries.append(RosterEntry(**facts, host=host, port=port))
        roster = Roster(run, tuple(entries))
        settings, options = job.offered()
        for each in servers:
            offer = Offer(
                run=run,
                verb=job.verb,
                worker=each.worker,
                client=socket.gethostname(),
                thinpipe=here["thinpipe"],
                torch=here["torch"],
                transformers=here["transformers"] if job.needs_transformers else None,
                patience_s=patience_s,
                settings=settings,
                options=options,
                files=files.manifest(),
                roster=roster.to_json(),
            )
            different = version_difference(offer, each.facts)
            if different is not None:
                raise Rejected(f"{each.desk.peer}: versions differ: {different}; install the same ones")
            each.desk.send(offer=facts_json(offer))
            offers.append(offer)
        for each in servers:
            self._answer(each, "accept")
        reached = {}
        for each in servers:
            others = list(roster.to_probe(each.worker))
            if others:
                each.desk.send(probe=others)
        for each in servers:
            if roster.to_probe(each.worker):
                reached[each.worker] = [int(other) for other in self._answer(each, "reached")]
        return roster, roster.dialers(reached), offers

    def _answer(self, server: MetServer, key: str) -> Any:
        try:
            answer = server.desk.receive(_ANSWER_S)
        except Rejected as error:
            raise Rejected(f"{server.desk.peer}: {error}") from None
        if key not in answer:
            raise Rejected(f"{server.desk.peer} answers out of order: install the same thinpipe")
        return answer[key]

    def relay(
        self, roster: Roster, dialers: Dialers, servers: Sequence[MetServer], peering: Peering, stack: ExitStack
    ) -> None:
        """Relay the pairs of servers that do not reach each other, and take connections of the run at the gate."""
        legs: dict[bytes, tuple[Relay, int]] = {}
        for pair in (pair for pair, dialer in dialers.items() if dialer is None):
            by_leg = {worker: roster.leg(worker, sum(pair) - worker) for worker in pair}

            def dial_leg(worker: int, by_leg: dict[int, bytes] = by_leg) -> socket.socket:
                host, port = servers[worker - 1].address or ("", 0)
                return connect(host, port, by_leg[worker], timeout_s=CONNECT_S)

            relay = Relay(pair, dial_leg if self._lobby is None else None)
            legs |= {route: (relay, worker) for worker, route in by_leg.items()}
            stack.callback(relay.close)
            relay.start()
            print_line(f"workers {pair[0]} and {pair[1]} do not reach each other: their traffic passes through here")

        def take(route: bytes, raw: socket.socket) -> bool:
            if route in legs:
                relay, worker = legs[route]
                relay.attach(worker, raw)
                return True
            return peering.arrived(route, raw)

        if self._lobby is not None:
            self._lobby.take = take


def _files_of(job: Job) -> ClientFiles:
    try:
        check_settings(dict(vars(job.settings)))
        return job.files()
    except ValueError as error:
        raise WorkerError(str(error), code=2) from None


@contextmanager
def _rejections(servers: Sequence[MetServer]) -> Iterator[None]:
    """Cancel the run on all servers if one rejects it, and raise WorkerError."""
    try:
        yield
    except (Gone, Rejected, OptionError) as error:
        for each in servers:
            with suppress(Gone):
                each.desk.send(cancel=str(error))
        raise WorkerError(str(error), code=1 if isinstance(error, Gone) else 2) from None


def announced_address(text: str | None) -> tuple[str | None, int]:
    """Return host and port of an address that a server has announced; None and 0 if it has none, or no valid one."""
    host, colon, port = (text or "").rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        return None, 0
    return host.strip("[]"), int(port)


class _Watch:
    """A thread that reads the desks during the run: a worker that was killed ends it at once."""

    def __init__(self, servers: Sequence[MetServer], mesh: Mesh) -> None:
        self._servers, self._mesh = {each.desk.fileno(): each for each in servers}, mesh
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinpipe-desks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5)

    def _run(self) -> None:
        ready = select.poll()
        for number in self._servers:
            ready.register(number, select.POLLIN)
        left = dict(self._servers)
        while left and not self._closed.is_set():
            for number, _ in ready.poll(200):
                server = left[number]
                try:
                    message = server.desk.poll()
                except (Gone, Rejected):  # perhaps only the desk: the run goes on, and finds out by itself
                    message = {}
                if message is None:
                    continue
                ready.unregister(number)
                del left[number]
                cause = message.get("end", {}).get("cause")
                if cause is not None:
                    self._mesh.fail(server.worker, one_line(str(cause))[:2000])


def find_servers(
    tickets: str | None,
    listens: str | None,
    address: str | None,
    workers: int | None,
    *,
    chooses_devices: bool,
    spares: bool = False,
) -> Servers:
    """Return the servers that the options of a client name; raise ValueError for contradictions.

    ``spares``: there may be more tickets than ``workers`` needs.
    """
    if tickets is not None and listens is not None:
        raise OptionError("{servers} dials servers, {listen} waits for them: give one of them")
    if address is not None and listens is None:
        raise OptionError("{address} is the address in the ticket of {listen}: give that too, or leave it out")
    if tickets is not None:
        found = [Ticket.parse(each) for each in tickets.split(",") if each.strip()]
        if len({(each.host, each.port) for each in found}) < len(found):
            raise OptionError("{servers} names one server twice: give the ticket of each server once")
        if spares and 2 <= (workers or 0) <= len(found):
            return Servers(found, None, (workers or 0) - 1, chooses_devices=chooses_devices)
        if workers not in (None, len(found) + 1):
            raise OptionError(
                f"{len(found)} ticket{'s' * (len(found) > 1)} and this client are {len(found) + 1} workers, and "
                f"{{workers}} {workers} are asked for: leave it out, or give a ticket for each server"
            )
        return Servers(found, None, len(found), chooses_devices=chooses_devices)
    if spares:
        raise OptionError("{mirror_every} needs servers that this client can dial again: name them with {servers}")
    if workers is None or workers < 2:
        raise OptionError("{listen} waits for servers: say for how many with {workers} N, the client included")
    host, port = parse_address(listens or "", "listen")
    return Servers([], Lobby(host, port, address, workers - 1), workers - 1, chooses_devices=chooses_devices)
