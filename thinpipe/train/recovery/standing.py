"""Members, formations and failures, as the coordinator of recovery records them."""

from __future__ import annotations

from typing import NamedTuple

from thinpipe.train.recovery.messages import Phase, Report, SnapshotId

NO_SNAPSHOT = SnapshotId(0, 0)
_MOST_CHALLENGES = 8


class Formation(NamedTuple):
    """The members of an attempt."""

    attempt: int
    members: tuple[str, ...]
    lives: tuple[int, ...]
    cut: tuple[int, ...]


NO_FORMATION = Formation(0, (), (), ())


class Failure(NamedTuple):
    """Why an attempt cannot go on; certain if that is known of the member itself, and not reported by another."""

    cause: str
    about: str
    is_certain: bool


class PeerState:
    """One member: its present life, and the lives that may follow.

    Lives have no order, and the report of an earlier one may arrive late; but it cannot contain the number of a later
    order. So a new life is admitted once it has answered an order that was made after its first report. While the
    present life reports, another process of its name is ignored.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard_at = self.sent_at = 0.0
        self.note = ""
        self._challenges: dict[int, int] = {}  # new lives, and the numbers of the orders that they have to answer
        self._begin(0)

    def _begin(self, life: int) -> None:
        self.life = life
        self.report = Report("", self.name, life, 0)
        self.lost = ""  # why it is certainly over
        self.have = NO_SNAPSHOT  # the newest snapshot of it that the client stores
        self.failures = 0

    def may_change(self, is_silent: bool) -> bool:
        """Return whether another life may take the name."""
        return not self.life or is_silent or self.lost != "" or self.report.phase == Phase.OVER

    def challenge(self, life: int, number: int) -> None:
        self._challenges.setdefault(life, number)
        if len(self._challenges) > _MOST_CHALLENGES:
            del self._challenges[next(iter(self._challenges))]

    def admits(self, report: Report) -> bool:
        """Return whether a report is a new life's answer to its challenge; if so, begin that life."""
        number = self._challenges.get(report.life)
        if number is None or report.heard < number:
            return False
        self._challenges.clear()
        self._begin(report.life)
        return True
