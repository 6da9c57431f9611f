"""When a fault strikes: the phases of a run, as they are seen from outside."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.faults.runs import STEPS, STEPS_PER_EPOCH, Run

Phase = Literal["start", "step", "save", "evaluation", "end"]
PHASES: tuple[Phase, ...] = ("start", "step", "save", "evaluation", "end")
_LOOK_EVERY_S = 0.003  # a save takes some 20 ms


@dataclass(frozen=True)
class Moment:
    """A phase of a run, and how far into it."""

    phase: Phase
    step: int  # whose checkpoint is seen, or being written
    after_s: float  # then; at the start: seconds of computing that the target has done

    @property
    def is_at_once(self) -> bool:
        """The fault is there from the beginning, and meets the run when it may."""
        return self.phase == "start" and not self.after_s

    def __str__(self) -> str:
        if self.phase == "start":
            return f"after {self.after_s:.1f} s of its start"
        return f"{self.phase}, {self.after_s * 1e3:.0f} ms after the sign of it at step {self.step}"


# Seconds of computing that a process has behind it while it starts: computing, not time, since others compute here,
# too. A command imports torch; before, the interpreter itself is being loaded, which is in nobody's hands. A worker
# that is forked has all that already.
COMMAND_STARTS_S, WORKER_STARTS_S = (0.3, 4.5), (0.0, 1.5)


AT_ONCE = Moment("start", 0, 0.0)


def draw_moment(
    random: random.Random, *, phases: tuple[Phase, ...] = PHASES, starts_s: tuple[float, float] = COMMAND_STARTS_S
) -> Moment:
    phase = random.choice(phases)
    if phase == "start":
        return Moment(phase, 0, random.uniform(*starts_s))
    if phase == "step":
        return Moment(phase, random.randint(1, STEPS - 2), random.uniform(0, 0.2))
    if phase == "save":
        return Moment(phase, random.randint(1, STEPS - 1), random.uniform(0, 0.03))
    if phase == "evaluation":  # follows the last step of an epoch, and has its checkpoint behind it
        epoch = random.randrange(STEPS // STEPS_PER_EPOCH)
        return Moment(phase, (epoch + 1) * STEPS_PER_EPOCH - 1, random.uniform(0.05, 0.4))
    return Moment(phase, STEPS, random.uniform(0, 0.5))


def await_moment(run: Run, moment: Moment, limit_s: float, target: Callable[[], int | None]) -> bool:
    """Wait for it; False if the run was over before, or the target never there."""
    if moment.is_at_once:
        return True
    until = time.monotonic() + limit_s
    while time.monotonic() < until and not run.is_over:
        if _has_come(run, moment, target):
            if moment.phase != "start":
                time.sleep(moment.after_s)
            return not run.is_over
        time.sleep(0.05 if moment.phase == "start" else _LOOK_EVERY_S)
    return False


def _has_come(run: Run, moment: Moment, target: Callable[[], int | None]) -> bool:
    if moment.phase == "start":
        pid = target()
        processes = [process for machine in run.machines for process in machine.processes()]
        return any(process.pid == pid and process.cpu_s >= moment.after_s for process in processes)
    steps = run.steps()
    newest = steps[-1] if steps else 0
    if moment.phase == "save":
        return newest >= moment.step - 1 and any(run.saved.glob("step-*.partial"))
    return newest >= moment.step
