"""The attempts of a run that continues without a lost server, as a server takes part in them.

The process of the run is that of all attempts. Its supervisor forwards orders and reports; for every attempt it learns
the routes of new connections, which are derived from the attempt and its members: peers of another one find no route.
"""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from thinpipe.comm.membership import become_served, joined_mesh, print_line
from thinpipe.comm.secure.identity import own_identity
from thinpipe.comm.secure.mesh import Mesh
from thinpipe.train.recovery.driver import BEAT_S, MemberDriver, ticking
from thinpipe.train.recovery.member import MemberMachine
from thinpipe.train.recovery.messages import CLIENT, End, FormGroup, Order, Report, message_json, parse_message
from thinpipe.train.serve.jobs import Job, run_with_files
from thinpipe.train.serve.model_files import PlacedFiles, fetch_files
from thinpipe.train.serve.peering import Peering
from thinpipe.train.serve.roster import Roster, dialers_of
from thinpipe.train.settings import Settings
from thinpipe.train.worker import Outcome, run_on_worker

Prepared = tuple[PlacedFiles, Job]


def member_name(roster: Roster, number: int) -> str:
    """Return the name of a worker of the full roster in messages of recovery."""
    return f"server {number} ({roster.entries[number].name})" if number else CLIENT


class Formation:
    """One attempt's group: its roster, and the numbers of its workers in the full roster."""

    def __init__(self, roster: Roster, form: FormGroup) -> None:
        by_name = {member_name(roster, number): number for number in range(len(roster.entries))}
        self.numbers = [by_name[name] for name in form.members]
        self.roster = roster.group(f"attempt {form.attempt} {form.lives}", self.numbers)

    def settings(self, settings: Settings) -> Settings:
        """Return the settings of a run for this group."""
        devices = [each.device for each in self.roster.entries]
        device = devices[0] if len(set(devices)) == 1 else ",".join(devices)
        return replace(settings, workers=len(devices), device=device)


def take_part(
    assignment: Any, report: Any, arrivals: Any, first: Prepared, prepare: Callable[[Any], Prepared]
) -> Outcome:
    """Take part in attempts of a run until it has ended.

    ``report``: to the supervisor. ``first``: what ``prepare(assignment)`` has returned for the first attempt.
    """
    offer, roster = assignment.offer, assignment.roster
    dialers = arrivals.wait_for_start(roster)
    prepared = [first]

    def send(message: Report) -> None:
        with suppress(OSError):  # the supervisor has ended
            report.pipe.send(report=message_json(message))

    machine = MemberMachine(
        member_name(roster, offer.worker),
        secrets.randbits(62) + 1,
        every=first[1].arguments[0].mirror_every,
        beat_s=BEAT_S,
        patience_s=offer.patience_s,
    )
    driver = MemberDriver(machine, send)

    def take_order(facts: Any) -> None:
        with suppress(ValueError):  # not of this version; the client's next one is the same
            driver.receive(parse_message(Order, facts))

    def attempt(form: FormGroup) -> Outcome:
        formation = Formation(roster, form)
        mesh = Mesh(form.worker, len(form.members), patience_s=offer.patience_s, report=print_line)
        peering = Peering(formation.roster, form.worker, own_identity(), mesh)
        peering.add_pairs(dialers_of(formation.numbers, dialers), assignment.client)
        driver.use(mesh)
        arrivals.give_to(peering.arrived)
        report.pipe.send(routes=[route.hex() for route in formation.roster.routes(form.worker)])
        mesh.start()
        placed, job = prepared.pop() if prepared else prepare(assignment)
        become_served(form.worker, len(form.members))
        assert isinstance(job.settings, Settings)
        settings, arguments = formation.settings(job.settings), (*job.arguments, driver.keeper)
        with joined_mesh(mesh, patience_s=offer.patience_s, end=mesh.abort, again=True):
            return run_on_worker(run_with_files, settings, job.main, partial(fetch_files, placed), *arguments)

    arrivals.take_order = take_order
    arrivals.orphaned = partial(report.leave, 128 + signal.SIGTERM)  # its state is worth nothing without orders
    ended = threading.Event()
    ticking(driver.tick, ended)
    end = driver.run(attempt)
    ended.set()
    assert isinstance(end, End)  # a server waits for it after the last step
    return Outcome(end.code, end.cause)
