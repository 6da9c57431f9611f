"""Faults of the machines of a run with servers: signals, stops, absence, strangers, and two faults at a time."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from tests.faults.expected import END_S, Expected, GoesOn
from tests.faults.fault import Fault, Missed, starting
from tests.faults.kinds.networks import PHASES, draw_how, proxy_of
from tests.faults.kinds.signals import ENDING
from tests.faults.moments import AT_ONCE, draw_moment
from tests.faults.runs import PATIENCE_S, STEPS, Run, Setting
from tests.faults.served import RunWithServers
from tests.train.serve.machines import listeners_of

_CONNECTIONS = 40
_ATTACKS = {
    "sends nothing": b"",
    "sends half a route": bytes(7),
    "sends junk": random.Random(0).randbytes(1 << 12),
    "asks for the desk, and sends nothing": bytes(16),
    "asks for the desk, and sends junk": bytes(16) + random.Random(1).randbytes(1 << 12),
    "asks for the desk, and announces 16 kB of TLS": bytes(16) + b"\x16\x03\x01\x40\x00",
}
# Seconds of computing of a process that was forked with all imports, until the first step.
_STARTS_S = (0.0, 0.8)


def _pid(run: Run, number: int, *, process: bool) -> int:
    """Return the process of a worker, or of the server that has started it."""
    pid = run.machines[number].pid if process or not number else run.worker(number)
    if pid is None or run.machines[number].is_over:
        raise Missed
    return pid


def _name(number: int, *, process: bool) -> str:
    return "the client" if not number else f"server {number}" if process else f"the worker of server {number}"


def draw_signal(random: random.Random, setting: Setting) -> Fault:
    """A signal that ends the client, a server, or its worker."""
    number, victim, process = random.choice(ENDING), random.randrange(setting.workers), random.random() < 0.5
    moment = draw_moment(random, starts_s=_STARTS_S)
    killed, late = number == signal.SIGKILL, moment.step >= STEPS - 1
    goes_on: GoesOn = "may" if late else "must not"
    own = frozenset({128 + number})
    # A server that is killed takes its worker with it by SIGTERM.
    others = frozenset({1, 2}) | (frozenset() if killed and not process else own | {128 + signal.SIGTERM})
    is_whole = process or not victim
    expected = Expected(
        goes_on,
        others,
        cause=rf"worker {victim}\b|server {victim}\b|interrupted|SIG|is stopping|is gone|has ended|closed",
        codes_of={victim: own if is_whole and killed else own | {1}},
        silent=frozenset({victim}) if killed and is_whole else frozenset(),
        within_s=PATIENCE_S + 2 * END_S,
    )
    return Fault(
        words=f"{number.name} to {_name(victim, process=process)}, {moment}",
        strike=lambda run: os.kill(_pid(run, victim, process=process), number),
        moment=moment,
        target=lambda run: run.worker(victim),
        expected=expected,
        start=starting(),
        how=draw_how(random),
    )


def draw_stop(random: random.Random, setting: Setting) -> Fault:
    """SIGSTOP to the client, a server or its worker: for less than the patience; to a worker also for longer."""
    too_long = random.random() < 0.3
    victim, process = random.randrange(setting.workers), not too_long and random.random() < 0.4
    moment = draw_moment(random, phases=PHASES)
    # The silence is noticed first, and then connections are tried for the patience.
    stopped_s = 2.5 * PATIENCE_S if too_long else random.uniform(0.5, 0.6 * PATIENCE_S)

    def strike(run: Run) -> None:
        pid = _pid(run, victim, process=process)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(pid, signal.SIGCONT)

    ends = Expected("must not", frozenset({1}), cause=r"worker \d\b")
    return Fault(
        words=f"SIGSTOP to {_name(victim, process=process)} for {stopped_s:.1f} s, {moment}",
        strike=strike,
        moment=moment,
        expected=ends if too_long else Expected("must"),
        start=starting(),
        how=draw_how(random),
    )


def draw_absent(random: random.Random, setting: Setting) -> Fault:
    """A server that cannot be reached at first, or comes late; or never."""
    absent, how = random.randrange(1, setting.workers), draw_how(random)
    never = how == "serve" and random.random() < 0.5  # a client waits for servers ten times its patience
    late_s = random.uniform(0.5, 0.5 * PATIENCE_S)

    def start(run: Run) -> None:
        assert isinstance(run, RunWithServers)
        run.absent = absent
        starting()(run)

    def strike(run: Run) -> None:
        assert isinstance(run, RunWithServers)
        if not never:
            time.sleep(late_s)
            run.join()

    ends = Expected("must not", frozenset({1}), cause="does not answer|closed the connection", within_s=3 * END_S)
    return Fault(
        words=f"server {absent} {'never comes' if never else f'comes {late_s:.1f} s late'}",
        strike=strike,
        moment=AT_ONCE,
        expected=ends if never else Expected("must"),
        start=start,
        how=how,
    )


def draw_stranger(random: random.Random, setting: Setting) -> Fault:
    """Strangers at the one port of every machine that listens."""
    what = random.choice(list(_ATTACKS))
    moment = draw_moment(random, phases=("start", *PHASES), starts_s=_STARTS_S)
    kept: list[socket.socket] = []

    def strike(run: Run) -> None:
        pids = [process.pid for machine in run.machines for process in machine.processes()]
        for address in listeners_of(pids):
            with suppress(OSError):  # the gate may close what it does not like
                for _ in range(_CONNECTIONS):
                    kept.append(socket.create_connection(("127.0.0.1", int(address.split(":")[1], 16)), 5))
                    kept[-1].sendall(_ATTACKS[what])

    def undo(run: Run) -> None:
        for each in kept:
            each.close()

    return Fault(
        words=f"a stranger {what}, {_CONNECTIONS} times, {moment}",
        strike=strike,
        moment=moment,
        expected=Expected("must"),
        start=starting(),
        how=draw_how(random),
        undo=undo,
    )


def draw_pair(random: random.Random, setting: Setting) -> Fault:
    """While the network of a server is down, a worker is killed or stopped for a while."""
    cut, victim = (random.randrange(first, setting.workers) for first in (1, 0))
    kills = random.random() < 0.5
    moment = draw_moment(random, phases=PHASES)
    before_s, between_s, after_s = (random.uniform(0, 0.15 * PATIENCE_S) for _ in range(3))

    def strike(run: Run) -> None:
        proxy = proxy_of(run, cut)
        proxy.set_down(True)
        time.sleep(before_s)
        try:
            pid = _pid(run, victim, process=False)
            os.kill(pid, signal.SIGKILL if kills else signal.SIGSTOP)
            time.sleep(between_s)
            if not kills:
                os.kill(pid, signal.SIGCONT)
                time.sleep(after_s)
        finally:
            proxy.set_down(False)

    ends = Expected(
        "must not",
        frozenset({1}),
        cause=rf"worker {victim}\b",
        codes_of={0: frozenset({137})} if not victim else {},
        silent=frozenset({0}) if not victim else frozenset(),
        within_s=PATIENCE_S + 2 * END_S,
    )
    return Fault(
        words=f"the network of server {cut} down, and meanwhile {_name(victim, process=False)} "
        f"{'killed' if kills else f'stopped for {between_s:.1f} s'}, {moment}",
        strike=strike,
        moment=moment,
        expected=ends if kills else Expected("must"),
        start=starting(),
        how=draw_how(random),
    )


def served(draw: Callable[[random.Random, Setting], Fault]) -> Callable[[random.Random, Setting], Fault]:
    """Return a kind of fault for runs with servers that other runs have, too."""

    def drawn(random: random.Random, setting: Setting) -> Fault:
        how = draw_how(random)
        return replace(draw(random, setting), how=how)

    return drawn
