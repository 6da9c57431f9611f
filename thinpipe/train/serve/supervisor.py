"""The supervisor of `thinpipe serve`: it listens, or dials the client of a ticket, and starts a process for every run.

    gate: route 0  ->  handshake, admission  ->  desk: facts, offer, probe, start  ->  worker process
    gate: a route of a run  ------------------------------------------------------->  worker process (SCM_RIGHTS)

It holds no state of a run but its routes and its process, and reads nothing that the workers send to each other. A run
that fails, a client that vanishes and strangers on the port end one run at most.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from thinpipe.comm.secure.gate import DESK
from thinpipe.comm.secure.handshake import HandshakeError, accept, connect, dial
from thinpipe.comm.secure.identity import Identity, fingerprint_text
from thinpipe.comm.secure.peers import KnownPeers
from thinpipe.comm.secure.ticket import Admission, Ticket
from thinpipe.system.sanitize import one_line
from thinpipe.train.serve.desk import (
    PROTOCOL,
    Desk,
    Gone,
    Offer,
    Rejected,
    facts_json,
    parse_offer,
    reason_of,
    version_difference,
)
from thinpipe.train.serve.peering import CONNECT_S, Address, may_dial, source_of
from thinpipe.train.serve.roster import Roster, parse_dialers
from thinpipe.train.serve.served_run import Owner, ServedRun

_ENDING_S = 5.0  # for a place, before a client is rejected
_SILENT_S = 60.0  # a client that sends nothing for so long before the run is gone
_PROBE_S = 3.0
_MOST_PROBED, _PROBED_S = 64, 600.0  # addresses, in a time
_MOST_DESKS = 16  # conversations at a time
_AGAIN_S = 2.0  # between attempts to reach a client


class _Rejoined(Exception):
    """A desk was given to the conversation of a run."""


class Supervisor:
    """Takes offers and routes connections; one thread per conversation with a client."""

    def __init__(
        self,
        owner: Owner,
        identity: Identity,
        admission: Admission | None,  # of clients; None: none are admitted
        report: Callable[[str], None],
        ended: Callable[[int], None],  # called with the exit code of every run that began
    ) -> None:
        self._owner, self._identity, self._admission, self._report = owner, identity, admission, report
        self._ended = ended
        self._runs: dict[str, ServedRun] = {}
        self._lock = threading.Condition()
        self._desks = threading.Semaphore(_MOST_DESKS)
        self._closing = False
        self._probed: deque[float] = deque(maxlen=_MOST_PROBED)  # times

    def handle(self, route: bytes, raw: socket.socket) -> bool:
        """Take a connection of the gate; return False for a route of no run."""
        if route == DESK:
            if self._admission is None:
                return False
            channel, fingerprint = accept(raw, self._identity, self._admission, deadline_s=CONNECT_S)
            if not self._desks.acquire(blocking=False):
                channel.close()
                return True
            self._report(f"client {fingerprint_text(fingerprint)[:12]} has connected from {source_of(channel)}")
            threading.Thread(target=self._receive_client, args=(channel, fingerprint), daemon=True).start()
            return True
        with self._lock:
            run = next((each for each in self._runs.values() if route in each.routes), None)
        if run is None or run.pipe is None:
            return False
        if not run.started:  # a probe: it is enough that it arrives
            key = run.roster.fingerprint(run.routes[route])
            accept(raw, self._identity, key, route=route, deadline_s=CONNECT_S)[0].close()
            return True
        run.pipe.send(raw, route=route.hex())
        raw.close()
        return True

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return bool(self._runs)

    def dial(self, ticket: Ticket, attempts_s: float | None) -> None:
        """Take offers of the client of a ticket, one run after the other, while it answers within ``attempts_s``.

        Raise HandshakeError if it does not, or rejects this server for good.
        """
        began, announced, client = time.monotonic(), False, f"{ticket.host}:{ticket.port}"
        while not self._closing:
            try:
                raw = connect(ticket.host, ticket.port, DESK, timeout_s=CONNECT_S)
                channel = dial(raw, self._identity, ticket.fingerprint, secret=ticket.secret, deadline_s=CONNECT_S)
            except HandshakeError as error:
                if error.final or (attempts_s is not None and time.monotonic() - began > attempts_s):
                    raise
                if not announced:
                    self._report(f"{error}; trying again")
                announced = True
                time.sleep(_AGAIN_S)
                continue
            announced = False
            self._report(f"connected to {client}, waiting for its run")
            self._converse(Desk(channel, f"the client at {client}"), ticket.fingerprint, (ticket.host, ticket.port))
            began = time.monotonic()
            time.sleep(_AGAIN_S)

    def stop(self, number: int) -> None:
        """Take no more runs, and send a signal to the workers."""
        self._closing = True
        with self._lock:
            processes = [run.process for run in self._runs.values() if run.process is not None]
        for process in processes:
            with suppress(OSError):
                os.kill(process.pid, number)

    def _receive_client(self, channel: Any, fingerprint: bytes) -> None:
        try:
            self._converse(Desk(channel, "the client"), fingerprint, None)
        finally:
            self._desks.release()

    def _converse(self, desk: Desk, fingerprint: bytes, client: Address | None) -> None:
        """Talk to one client until its run has ended here."""
        run, end = None, None
        connected: Desk | None = desk
        try:
            run = self._agree(desk, fingerprint, client)
            if run is not None:
                end, connected = run.wait(desk)
                cause = end.get("cause") or end.get("done") or end.get("reject")
                self._report(f"{run.text} " + (f"has ended: {one_line(str(cause))[:500]}" if cause else "is complete"))
                if connected is not None:
                    connected.send(end=end)
        except Rejected as error:
            self._report(f"rejected a run of {fingerprint_text(fingerprint)[:12]}: {error}")
            with suppress(Gone):
                desk.send(reject=reason_of(error))
        except Gone as error:
            self._report(str(error))
        except _Rejoined:
            connected = None  # the conversation of the run has it
        except Exception as error:  # of one conversation: the server goes on
            self._report(f"a conversation with a client failed: {type(error).__name__}: {error}")
        finally:
            if run is not None:
                self._forget(run)
            if connected is not None:
                connected.close()
            if end is not None:
                self._ended(int(end.get("code", 2)))

    def _agree(self, desk: Desk, fingerprint: bytes, client: Address | None) -> ServedRun | None:
        """Answer the client's questions; return the run when it starts, None if the client has given up."""
        run: ServedRun | None = None
        try:
            while True:
                message = desk.receive(_SILENT_S)
                if "facts" in message:
                    if message["facts"] != PROTOCOL:
                        raise Rejected(
                            f"the client has version {message['facts']!r} of the desk protocol and the server "
                            f"{PROTOCOL}: install the same thinpipe"
                        )
                    desk.send(facts=facts_json(self._owner.facts))
                elif "rejoin" in message and run is None:
                    self._rejoin(desk, message["rejoin"], fingerprint)
                elif "offer" in message and run is None:
                    run = self._begin(parse_offer(message["offer"]), fingerprint, client)
                    desk.send(accept=True)
                elif "probe" in message and run is not None:
                    desk.send(reached=self._probe(run, message["probe"], source_of(desk.channel)))
                elif "start" in message and run is not None:
                    assert run.pipe is not None
                    _check_dialled(run, message["start"], source_of(desk.channel))
                    run.started = True  # before the worker knows, so that no connection is taken for a probe
                    run.pipe.send(start=message["start"])
                    self._report(f"{run.text} starts: worker {run.offer.worker} of {len(run.roster.entries)}")
                    return run
                elif "cancel" in message:
                    raise Gone(f"{desk.peer} has given up: {one_line(str(message['cancel']))[:500]}")
                elif "wait" not in message:
                    raise Rejected(f"{desk.peer} sent a message out of order")
        except BaseException:
            if run is not None:
                self._forget(run)
            raise

    def _rejoin(self, desk: Desk, name: Any, fingerprint: bytes) -> None:
        """Give the desk to a run of this client that is here; raise _Rejoined if it has it."""
        with self._lock:
            mine = [each for each in self._runs.values() if each.roster.fingerprint(0) == fingerprint and each.started]
        found = next((each for each in mine if each.offer.run == name), None)
        desk.send(rejoined=found is not None)
        if found is not None:
            found.desks.put(desk)
            raise _Rejoined

    def _begin(self, offer: Offer, fingerprint: bytes, client: Address | None) -> ServedRun:
        """Check an offer, and start the process of the run; raise Rejected if it is not possible."""
        facts = self._owner.facts
        different = version_difference(offer, facts)
        if different is not None:
            raise Rejected(f"versions differ: {different}; install the same ones")
        try:
            roster = Roster.from_json(offer.run, offer.roster)
        except ValueError as error:
            raise Rejected(str(error)) from None
        if roster.fingerprint(0) != fingerprint or roster.fingerprint(offer.worker) != self._identity.fingerprint:
            raise Rejected("the roster of the offer has another key for the client or for this server")
        if client is None:
            with suppress(OSError, ValueError):  # a full disk does not end a run
                KnownPeers().remember(fingerprint, offer.client)
        name = f"{one_line(offer.client)[:60]} ({fingerprint_text(fingerprint)[:12]})"
        folder = self._owner.cache / "runs" / secrets.token_hex(8)
        run = ServedRun(offer, roster, name, folder, self._owner)
        with self._lock:
            # A run that its client has just left takes a moment to end.
            has_place = self._lock.wait_for(lambda: self._closing or len(self._runs) < self._owner.runs, _ENDING_S)
            if self._closing:
                raise Rejected(f"{facts.name} is stopping")
            if not has_place:
                raise Rejected(self._busy_text())
            self._runs[folder.name] = run
        try:
            run.fork(client)
        except BaseException:
            self._forget(run)
            raise
        return run

    def _busy_text(self) -> str:
        """Describe the runs of this server without their clients, which other clients must not learn."""
        minutes = max(time.monotonic() - run.began for run in self._runs.values()) / 60
        what = "a run" if self._owner.runs == 1 else f"{len(self._runs)} runs"
        return f"{self._owner.facts.name} is busy with {what} since {minutes:.0f} min: try later, or use another server"

    def _probe(self, run: ServedRun, servers: Any, client: str) -> list[int]:
        """Return which of these servers this one reaches: their key must answer at their address.

        A client names the addresses, so they are limited in kind and in number; the others count as not reached.
        """

        def reaches(other: int, host: str, port: int) -> bool:
            if not may_dial(host, client):
                return False
            with self._lock:
                now = time.monotonic()
                if len(self._probed) == _MOST_PROBED and now - self._probed[0] < _PROBED_S:
                    return False
                self._probed.append(now)
            route = run.roster.route(run.offer.worker, other)
            try:
                raw = connect(host, port, route, timeout_s=_PROBE_S)
                key = run.roster.fingerprint(other)
                dial(raw, self._identity, key, route=route, deadline_s=_PROBE_S).close()
            except OSError:
                return False
            return True

        allowed = run.roster.to_probe(run.offer.worker)
        if not isinstance(servers, list) or not all(other in allowed for other in servers):
            raise Rejected("a probe names servers of the roster with an address")
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda other: reaches(other, *allowed[other]), servers))
        return [other for other, reached in zip(servers, found, strict=True) if reached]

    def _forget(self, run: ServedRun) -> None:
        """Free the place of a run."""
        run.clear()
        with self._lock:
            self._runs.pop(run.folder.name, None)
            self._lock.notify_all()


def _check_dialled(run: ServedRun, dialers: Any, client: str) -> None:
    """Raise Rejected if a start makes this server connect to an address that it may not connect to."""
    try:
        found = parse_dialers(dialers, run.roster)
    except ValueError as error:
        raise Rejected(str(error)) from None
    for pair in (pair for pair, dialer in found.items() if dialer == run.offer.worker):
        host = run.roster.entries[sum(pair) - run.offer.worker].host
        if host is None or not may_dial(host, client):
            raise Rejected(f"this server does not connect to {one_line(str(host))[:100]} for a client elsewhere")
