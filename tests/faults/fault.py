"""The contract of a fault, and the way of a case: start, strike, watch it end, take it up again."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.checks import check_clean, check_end, check_left, check_recovery, check_result
from tests.faults.expected import Expected, Result
from tests.faults.moments import Moment, await_moment
from tests.faults.runs import CODECS, How, Run, Setting
from tests.faults.undisturbed import LIMIT_S, Undisturbed


class Impossible(Exception):
    """This machine cannot do it; the message says what is missing."""


class Missed(Exception):
    """The target of the fault does not exist any more."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a run."""

    words: str  # what is done, for people
    strike: Callable[[Run], None]  # when the moment has come; Missed if there is nothing to strike
    moment: Moment
    target: Callable[[Run], int | None] = lambda run: run.machines[0].pid  # whose start the moment is about
    expected: Expected
    start: Callable[[Run], None]  # with the options and limits that the fault needs
    how: How = "launcher"
    setting: Setting | None = None  # of the run, where the fault needs another one than was drawn
    recover_options: tuple[str, ...] = ()  # how the run is taken up again
    undo: Callable[[Run], None] = lambda run: None  # what the lab has to clear away itself
    before_recovery: Callable[[Run], None] = lambda run: None
    also: Callable[[Run, Result], None] = lambda run, result: None  # one more check, of the run that has ended


def draw_setting(random: random.Random) -> Setting:
    return Setting(workers=random.choice((2, 2, 3)), codec=random.choice(CODECS))


def starting(*options: str, env: Mapping[str, str] | None = None, save_every: int = 1) -> Callable[[Run], None]:
    """Start a run that saves, with more options."""

    def start(run: Run) -> None:
        run.start("--save", str(run.saved), "--save-every", str(save_every), *options, env=env)

    return start


def carry_out(fault: Fault, run: Run, undisturbed: Undisturbed, result: Result) -> None:
    """The case, from its start to the last check."""
    try:
        fault.start(run)
        struck = await_moment(run, fault.moment, LIMIT_S, lambda: fault.target(run))
        known, at = run.steps(), time.monotonic()
        expected = fault.expected
        if (
            fault.moment.phase == "start"
            and known
            and known[-1] >= run.setting.steps - 1
            and expected.goes_on == "must not"
        ):
            expected = replace(expected, goes_on="may")  # it computed so little that its start was over long ago
        try:
            if struck:
                fault.strike(run)
        except (Missed, ProcessLookupError):
            struck = False
        result.missed = not struck
        if _has_ended(run, expected, result, struck=struck):
            if struck and not fault.moment.is_at_once and any(machine.code for machine in run.machines):
                result.ended_s = time.monotonic() - at
            check_left(run, result)
            check_end(run, expected, result, struck=struck)
            fault.also(run, result)
        run.end()
        fault.before_recovery(run)
        _recover(run, fault, undisturbed, result, known=known[-1] if known else 0)
        check_clean(run, result)
    finally:
        run.end()
        fault.undo(run)


def _has_ended(run: Run, expected: Expected, result: Result, *, struck: bool) -> bool:
    limit_s = LIMIT_S if not struck or expected.goes_on != "must not" else expected.within_s
    if run.wait(limit_s):
        return True
    result.blame("hang", f"has not ended {limit_s:.0f} s after {'the fault' if struck else 'its start'}")
    return False


def _recover(run: Run, fault: Fault, undisturbed: Undisturbed, result: Result, *, known: int) -> None:
    steps = run.steps()
    ended_well = all(machine.code == 0 for machine in run.machines)
    if fault.expected.completes or (ended_well and steps and steps[-1] == run.setting.steps):
        check_result(run.saved, undisturbed.sha256(run.setting), result)
    elif any(run.saved.glob("step-*")) or (fault.expected.sweeps and any(run.tmp.iterdir())):
        # Else there is nothing that a second start would meet.
        sha256 = undisturbed.sha256(run.setting)
        check_recovery(run, sha256, result, at_least=known, options=fault.recover_options)


def discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
