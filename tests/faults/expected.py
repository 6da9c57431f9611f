"""The expected and the actual outcome of a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

GoesOn = Literal["must", "may", "must not"]
Sort = Literal["hang", "silent difference", "lost steps", "other"]

END_S = 20.0  # a machine that is told to end, or whose neighbour died, has ended by then; seconds are usual


@dataclass(frozen=True)
class Expected:
    """The expected outcome of a fault. A run that ended before the fault must have succeeded."""

    goes_on: GoesOn  # whether the run reaches its end all the same
    codes: frozenset[int] = frozenset()  # exit codes where it does not
    cause: str = ""  # pattern of the one line that says why; of any such line where it is empty
    within_s: float = END_S  # from the fault to the end, where the run does not go on
    silent: frozenset[int] = frozenset()  # machines that are killed outright, and cannot say why
    sweeps: bool = False  # nobody is left who could tidy up: the next start on this machine does
    codes_of: Mapping[int, frozenset[int]] = field(default_factory=dict)  # of machines that end unlike the others
    told: str = ""  # pattern of a line on stderr that a run that goes on must have
    foreign_words: bool = False  # torchrun says things of its own
    completes: bool = False  # the last checkpoint is there, whatever the exit code


@dataclass(frozen=True)
class Problem:
    """One way in which a case fell short."""

    sort: Sort
    text: str


@dataclass
class Result:
    """The outcome of one case."""

    seed: int
    kind: str
    words: str  # what was done
    problems: list[Problem] = field(default_factory=list)
    ended_s: float | None = None  # from the fault to the end of the run, where the fault ended it
    seconds: float = 0.0  # of the whole case
    missed: bool = False  # the run was over before the fault came
    skipped: str = ""  # why this machine cannot do it
    measured: list[str] = field(default_factory=list)  # lines for people

    @property
    def passed(self) -> bool:
        return not self.problems and not self.skipped

    def blame(self, sort: Sort, text: str) -> None:
        self.problems.append(Problem(sort, text))


def count(results: Sequence[Result], sort: Sort) -> int:
    """Cases with a problem of a sort."""
    return sum(any(problem.sort == sort for problem in result.problems) for result in results)
