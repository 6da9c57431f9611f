"""Checks of a run that was disturbed: its end, its words, what it left behind, and how it goes on."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.faults.expected import END_S, Expected, Result
from tests.faults.runs import Machine, Run, namespaces_of
from tests.faults.undisturbed import LIMIT_S, final_sha256

# Lines of ours that say how things stand, not why a run ended.
_NOTES = re.compile(
    r"thinpipe: (the last checkpoint is|no checkpoint (was written|of step)|stopping after the (current )?step"
    r"|waiting for|worker \d+ is back|.* s after the start\n|joined worker 0 at|worker \d+ holds|the run is complete"
    r"|starting again|.*\bgo(es|ing) on\b|.* the run does not"
    r"|worker \d+ \(.*\) is here|\d+ of \d+ servers are here|workers \d+ and \d+ do not reach|no connection to worker"
    r"|connected to|  thinpipe serve|.*; trying again|worker \d+ needs|listening at port"
    r"|client \S+ has connected|run \w+ \(train\) of|weights of|activations of the frozen|comparing|\d+ blocks in"
    r"|a connection of another worker|[0-9.]+:[0-9]+ )"
)
_LOST = re.compile(r"thinpipe: run \w+ \(train\) of .* has ended: (.*)")  # of the log of a server
# Torch's cache of compiled code, whether it compiles or not; what torchrun wrote when it is told to end.
_KEPT_BY_TORCH = ("torchinductor_", "torchelastic_")


def causes(machine: Machine) -> list[str]:
    """Return the final messages of a command: lines that begin with its name, with those that follow each."""
    if machine.is_server and (found := _LOST.findall(machine.stderr())):
        return found
    parts = re.split(r"^(?=thinpipe: )", machine.stderr(), flags=re.MULTILINE)
    return [" ".join(part.split()) for part in parts if part.startswith("thinpipe: ") and not _NOTES.match(part)]


def check_end(run: Run, expected: Expected, result: Result, *, struck: bool) -> None:
    """Exit codes and words of every machine, once all have ended."""
    for number, machine in enumerate(run.machines):
        who = f"machine {number}: " if len(run.machines) > 1 else ""
        if "Traceback" in machine.stderr() and not expected.foreign_words:
            result.blame("other", f"{who}a traceback on stderr")
        if machine.code == 0:
            if struck and expected.goes_on == "must not" and expected.codes_of.get(number, expected.codes) != {0}:
                result.blame("other", f"{who}exit code 0 in spite of the fault")
            if found := causes(machine):
                result.blame("other", f"{who}exit code 0, but: {' / '.join(found)}")
            continue
        if not struck or expected.goes_on == "must":
            result.blame("other", f"{who}exit code {machine.code}, but the run should have gone on")
            continue
        if number in run.dismissed and machine.code == 128 + signal.SIGTERM:
            continue
        allowed = expected.codes_of.get(number, expected.codes)
        if machine.code not in allowed:
            result.blame("other", f"{who}exit code {machine.code}, not {' or '.join(map(str, sorted(allowed)))}")
        starting = machine.was_killed and not run.steps()  # it could not take signals yet
        if number not in expected.silent and not expected.foreign_words and not starting:
            _check_cause(machine, who, expected.cause, result)
    if struck and expected.told and not any(re.search(expected.told, each.stderr()) for each in run.machines):
        result.blame("other", f"stderr does not tell of it: no {expected.told!r}")


def _check_cause(machine: Machine, who: str, pattern: str, result: Result) -> None:
    found = causes(machine)
    if len(found) != 1:
        result.blame("other", f"{who}{len(found)} lines say why, not one: {' / '.join(found) or machine.stderr()!r}")
    elif not re.search(pattern, found[0]):
        result.blame("other", f"{who}the cause is not named: {found[0]!r} has no {pattern!r}")


def check_left(run: Run, result: Result) -> None:
    """Processes of a run that has ended."""
    if left := run.left(END_S):
        words = [f"{each.pid} {each.command[-80:]} ({each.state})" for each in left]
        result.blame("other", f"left running: {'; '.join(words)}")


def check_clean(run: Run, result: Result) -> None:
    """Check disk and kernel after the run was resumed, if it had to be."""
    if left := namespaces_of([machine.pid for machine in run.machines]):
        result.blame("other", f"namespaces left: {', '.join(left)}")
    if left := sorted(path.name for path in run.tmp.iterdir() if not path.name.startswith(_KEPT_BY_TORCH)):
        result.blame("other", f"temporary files left: {', '.join(left)}")
    if left := sorted(path.name for path in run.saved.glob("*.partial")):
        result.blame("other", f"half checkpoints left: {', '.join(left)}")


def check_recovery(run: Run, sha256: str, result: Result, *, at_least: int, options: tuple[str, ...] = ()) -> None:
    """Taken up again, the run goes on at the last checkpoint and ends where an undisturbed one does."""
    again = run.again()
    earlier = list(run.machines)
    machine = again.resume(*options)
    ended = again.wait(LIMIT_S)
    run.machines = [*earlier, *again.machines]  # whose sessions are ended with the case
    if not ended:
        result.blame("hang", f"taken up again it has not ended after {LIMIT_S} s")
        again.end()
        return
    if machine.code:
        result.blame("other", f"taken up again it ends with exit code {machine.code}: {machine.stderr()[-300:]!r}")
        return
    check_left(again, result)
    check_result(run.saved, sha256, result)
    first = first_step(machine)
    if first < at_least:
        result.blame("lost steps", f"taken up again at step {first}, but there was a checkpoint of step {at_least}")


def check_result(saved: Path, sha256: str, result: Result) -> None:
    found = final_sha256(saved)
    if not found:
        result.blame("other", "has not come to the end of its training")
    elif found != sha256:
        result.blame("silent difference", f"ends with parameters {found[:12]}, not {sha256[:12]}")


def first_step(machine: Machine) -> int:
    """After which step a run went on."""
    match = re.search(r"goes on after step (\d+)|this run is (complete)", machine.stdout())
    return 0 if match is None else 10**9 if match[2] else int(match[1])
