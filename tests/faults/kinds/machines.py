"""Runs on several machines: one is killed, comes late, never comes, or was given other options."""

from __future__ import annotations

import os
import random
import signal
import time

from tests.faults.expected import END_S, Expected
from tests.faults.fault import Fault, Missed, starting
from tests.faults.kinds.signals import ENDING
from tests.faults.moments import AT_ONCE, draw_moment
from tests.faults.runs import PATIENCE_S, How, Run, Setting

_OTHER_OPTIONS = (
    ("--steps", "3"),
    ("--save-every", "3"),
    ("--seed", "1"),
    ("--lr", "0.01"),
    ("--capture", "captured.safetensors"),
    ("--trace", "traced.json"),
    ("--save", "elsewhere"),
)
_PATHS = ("--capture", "--trace", "--save")


def draw_machine(random: random.Random, setting: Setting) -> Fault:
    """A signal to one machine of several."""
    return _signalled(random, setting, "machines", random.choice(ENDING))


def draw_torchrun(random: random.Random, setting: Setting) -> Fault:
    """The same to an agent of torchrun or to its worker."""
    return _signalled(random, setting, "torchrun", random.choice((signal.SIGKILL, signal.SIGTERM)))


def _signalled(random: random.Random, setting: Setting, how: How, number: signal.Signals) -> Fault:
    victim = random.randrange(setting.workers)
    agent = how == "torchrun" and random.random() < 0.5
    moment = draw_moment(random, phases=("start", "step", "save", "evaluation"))

    def strike(run: Run) -> None:
        pid = run.machines[victim].pid if agent else run.worker(victim)
        if pid is None or run.machines[victim].is_over:
            raise Missed
        os.kill(pid, number)

    killed = number == signal.SIGKILL
    own = frozenset({128 + number})
    expected = Expected(
        "must not",
        # All stop together where one is told to end in a step; elsewhere the others lose it.
        frozenset({1}) if killed else own | {1},
        cause=rf"worker {victim}\b" if killed else rf"worker {victim}\b|interrupted|{number.name}",
        codes_of={victim: own if how == "machines" else own | {1}},
        silent=frozenset({victim}) if killed else frozenset(),
        foreign_words=how == "torchrun",
        # A start takes seconds by itself: patience begins when a machine is ready for the others.
        within_s=PATIENCE_S + END_S * (3 if moment.phase == "start" else 1),
    )
    who = f"{'agent' if agent else 'worker'} {victim} of torchrun" if how == "torchrun" else f"machine {victim}"
    return Fault(
        words=f"{number.name} to {who}, {moment}",
        strike=strike,
        moment=moment,
        target=lambda run: run.worker(victim),
        expected=expected,
        start=starting(),
        how=how,
    )


def draw_absent(random: random.Random, setting: Setting) -> Fault:
    """A machine that comes late, or never."""
    absent = random.randrange(setting.workers)
    never = random.random() < 0.5
    late_s = random.uniform(1, 0.3 * PATIENCE_S)
    others = [rank for rank in range(setting.workers) if rank != absent]

    def start(run: Run) -> None:
        for rank in others:
            run.start_machine(rank, "--save", str(run.saved), "--save-every", "1")

    def strike(run: Run) -> None:
        if not never:
            time.sleep(late_s)
            run.start_machine(absent, "--save", str(run.saved), "--save-every", "1")

    # A start takes seconds by itself: patience begins when a machine is ready for the others.
    ends = Expected("must not", frozenset({1}), cause=rf"worker {absent}\b", within_s=PATIENCE_S + 3 * END_S)
    return Fault(
        words=f"machine {absent} {'never comes' if never else f'comes {late_s:.1f} s late'}",
        strike=strike,
        moment=AT_ONCE,
        expected=ends if never else Expected("must"),
        start=start,
        how="machines",
    )


def draw_options(random: random.Random, setting: Setting) -> Fault:
    """One machine was given other options than the rest."""
    odd = random.randrange(setting.workers)
    name, value = random.choice(_OTHER_OPTIONS)

    def start(run: Run) -> None:
        for rank in range(setting.workers):
            given = {"--save": str(run.saved), "--save-every": "1"}
            if rank == odd:
                given[name] = str(run.folder / value) if name in _PATHS else value
            run.start_machine(rank, *(text for pair in given.items() for text in pair))

    return Fault(
        words=f"machine {odd} has {name} {value}, the others have not",
        strike=lambda run: None,
        moment=AT_ONCE,
        expected=Expected("must not", frozenset({2}), cause=name.strip("-").replace("-", "."), within_s=4 * END_S),
        start=start,
        how="machines",
    )
