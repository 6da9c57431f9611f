"""Signals to one process of a run, or to all of it."""

from __future__ import annotations

import os
import random
import signal
import time

from tests.faults.expected import END_S, Expected, GoesOn
from tests.faults.fault import Fault, Missed, starting
from tests.faults.moments import COMMAND_STARTS_S, WORKER_STARTS_S, draw_moment
from tests.faults.runs import PATIENCE_S, STEPS, Run, Setting

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)


def draw_signal(random: random.Random, setting: Setting) -> Fault:
    """A signal that ends."""
    number = random.choice(ENDING)
    target = random.choice(("client", "server", "launcher", "group", "forking server"))
    worker = 0 if target == "client" else random.randrange(1, setting.workers) if target == "server" else None
    moment = draw_moment(random, starts_s=COMMAND_STARTS_S if worker is None else WORKER_STARTS_S)
    return Fault(
        words=f"{number.name} to {_name(target, worker)}, {moment}",
        strike=lambda run: send(run, number, target, worker),
        moment=moment,
        target=lambda run: _target(run, target, worker),
        expected=_expected(number, target, worker, late=moment.step >= STEPS - 1),
        start=starting(),
    )


def _expected(number: signal.Signals, target: str, worker: int | None, *, late: bool) -> Expected:
    # Who is told to end stops after the step under way; after the last one the run is as good as over.
    goes_on: GoesOn = "may" if late else "must not"
    if target == "forking server":  # it ignores some, and its workers end with it
        return Expected("may", frozenset({1, 128 + number, 128 + signal.SIGTERM}))
    if worker is None and number == signal.SIGKILL:  # nobody is left who could say anything
        return Expected(goes_on, frozenset({128 + number}), silent=frozenset({0}), sweeps=target == "group")
    shell = frozenset({128 + number})
    if worker is None:
        return Expected(goes_on, shell, cause="interrupted" if number == signal.SIGINT else number.name)
    if number == signal.SIGKILL:
        return Expected(goes_on, frozenset({1}), cause=rf"worker {worker}\b.*SIGKILL")
    # One that has not got as far as to take signals dies of them.
    return Expected(goes_on, shell | {1}, cause=rf"interrupted|{number.name}")


def draw_stop(random: random.Random, setting: Setting) -> Fault:
    """SIGSTOP: for less than the run's patience, or for good."""
    for_good = random.random() < 0.4
    target = random.choice(("client", "server") if for_good else ("client", "server", "launcher", "group"))
    worker = 0 if target == "client" else random.randrange(1, setting.workers) if target == "server" else None
    moment = draw_moment(random, phases=("step", "save", "evaluation"))
    stopped_s = random.uniform(0.5, 0.6 * PATIENCE_S)

    def strike(run: Run) -> None:
        send(run, signal.SIGSTOP, target, worker)
        if not for_good:
            time.sleep(stopped_s)
            send(run, signal.SIGCONT, target, worker)

    goes_on = Expected("must")
    ends = Expected("must not", frozenset({1}), cause=rf"worker {worker}\b", within_s=PATIENCE_S + END_S)
    for_time = "for good" if for_good else f"for {stopped_s:.1f} s"
    return Fault(
        words=f"SIGSTOP to {_name(target, worker)} {for_time}, {moment}",
        strike=strike,
        moment=moment,
        expected=ends if for_good else goes_on,
        start=starting(),
    )


def send(run: Run, number: signal.Signals, target: str, worker: int | None) -> None:
    pid = _target(run, target, worker)
    if pid is None or run.machines[0].is_over:
        raise Missed
    (os.killpg if target == "group" else os.kill)(pid, number)


def _target(run: Run, target: str, worker: int | None) -> int | None:
    if target == "forking server":
        return run.machines[0].forking_server()
    return run.machines[0].pid if worker is None else run.worker(worker)


def _name(target: str, worker: int | None) -> str:
    return f"the {target}" if worker is None else f"the {target} (worker {worker})"
