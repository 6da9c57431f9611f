"""Messages and actions of recovery: what coordinator and members exchange, and what they ask of their drivers.

Both messages carry the full state of their sender and a number that increases with every one sent. A receiver applies
the newest and ignores the others, so messages may be lost, repeated, delayed and reordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, get_type_hints

from thinpipe.system.sanitize import one_line

CLIENT = "client"  # the name of the member in the process of the coordinator; worker 0 of every attempt


class Phase:
    """Phases of a member."""

    FREE = "free"  # of any run
    IDLE = "idle"  # of this run, and not in the current attempt: a spare, or stopped
    STOPPING = "stopping"
    FORMING = "forming"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    BROKEN = "broken"
    OVER = "over"


_PHASES = {value for name, value in vars(Phase).items() if name.isupper()}


class SnapshotId(NamedTuple):
    """A snapshot: the attempt that took it, and its step. Attempt 0 is the start of the run, of which none is taken."""

    attempt: int
    step: int


class Order(NamedTuple):
    """The state of the coordinator, to one member."""

    run: str
    number: int
    life: int  # of the member that is addressed
    attempt: int
    members: tuple[str, ...] = ()  # by worker; none: stop, and stand by
    lives: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()
    base: SnapshotId = SnapshotId(0, 0)  # from which the attempt starts
    base_members: tuple[str, ...] = ()  # who took it
    base_cut: tuple[int, ...] = ()
    go: bool = False  # all members are ready
    pause: bool = False  # after a step that all agree on
    committed: SnapshotId = SnapshotId(0, 0)
    have: SnapshotId = SnapshotId(0, 0)  # the newest snapshot of the addressee that the client stores
    release: bool = False  # a member that leaves may end
    end: str | None = None  # the cause of the end of the run; empty: it is complete
    code: int = 0


class Report(NamedTuple):
    """The state of one member, to the coordinator."""

    run: str  # empty: none yet
    name: str
    life: int
    number: int
    heard: int = 0  # the number of the newest order
    attempt: int = 0
    phase: str = Phase.FREE
    step: int = 0  # completed in this attempt
    leaving: bool = False
    cause: str = ""  # of Phase.BROKEN
    blames: str = ""  # the member that the cause is about
    note: str = ""  # the latest problem that does not end the attempt


class Policy(NamedTuple):
    """The settings of a coordinator; times in seconds."""

    run: str
    servers: int  # wanted
    min_servers: int
    cuts: Mapping[int, tuple[int, ...]]  # number of workers -> the cut for them
    first_step: int = 0
    beat_s: float = 1.0  # between two messages to or from a member
    lost_s: float = 20.0  # without a message, after which a member is lost
    form_s: float = 120.0  # the longest that a formation, or the transfer of state in a pause, may take
    return_s: float = 60.0  # for a lost server to come back before the model is cut among those left
    end_s: float = 300.0  # without a new step after a loss, after which the run ends


class Send(NamedTuple):
    """Send a report to the coordinator."""

    report: Report


class SendTo(NamedTuple):
    """Send an order to a member."""

    name: str
    order: Order


class Stop(NamedTuple):
    """Abort the training of an attempt, then call ``stopped``."""

    attempt: int


class FormGroup(NamedTuple):
    """Load the worker's layers and the state of ``base``, connect the members, then call ``formed``."""

    attempt: int
    worker: int
    members: tuple[str, ...]
    lives: tuple[int, ...]
    cut: tuple[int, ...]
    base: SnapshotId
    base_members: tuple[str, ...]
    base_cut: tuple[int, ...]


class RunFrom(NamedTuple):
    """Train from the state after ``step``."""

    attempt: int
    step: int


class RequestPause(NamedTuple):
    """Ask all workers, in the statistics of the next step, to pause after it."""

    attempt: int


class Take(NamedTuple):
    """Copy the changing state before the next step begins."""

    snapshot: SnapshotId


class Pause(NamedTuple):
    """Begin no further step."""

    attempt: int


class Mirror(NamedTuple):
    """Send the local copy of a snapshot to the client's store, unless that transfer is in progress."""

    snapshot: SnapshotId


class Keep(NamedTuple):
    """Delete the copies of all snapshots before this one, which is committed."""

    snapshot: SnapshotId


class Notice(NamedTuple):
    """Report a line to the user."""

    text: str


class End(NamedTuple):
    """Leave the run, or end it; the code is that of the process."""

    cause: str
    code: int


MemberAction = Send | Stop | FormGroup | RunFrom | RequestPause | Take | Pause | Mirror | Keep | Notice | End
CoordinatorAction = SendTo | Keep | Notice | End


class Clock:
    """Time that hardly counts gaps between two events above a limit: the time for which this process stood still.

    A suspended machine, SIGSTOP or a clock that jumps, even repeatedly, must not make all others look silent.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._last: float | None = None
        self.now = 0.0

    def advance(self, now: float) -> float:
        if self._last is not None:
            gap = now - self._last
            if gap > 0:
                self.now += gap if gap < self._longest_gap_s else self._longest_gap_s / 4
        self._last = now
        return self.now


_Message = TypeVar("_Message", Order, Report)
_MOST_MEMBERS = 1000
_MOST_TEXT = 2000
_HINTS = {kind: get_type_hints(kind) for kind in (Order, Report)}


def message_json(message: Order | Report) -> dict[str, Any]:
    return message._asdict()


def parse_message(kind: type[_Message], facts: Any) -> _Message:
    """Return a message from the JSON of ``message_json``; raise ValueError for anything else."""
    hints = _HINTS[kind]
    if not isinstance(facts, dict) or facts.keys() != hints.keys():
        raise ValueError(f"{kind.__name__.lower()} of another version of thinpipe")
    message = kind(**{name: _parsed(facts[name], hint) for name, hint in hints.items()})
    if isinstance(message, Report) and message.phase not in _PHASES:
        raise ValueError("a report has an unknown phase")
    if isinstance(message, Order) and len(message.members) != len(message.lives):
        raise ValueError("an order has a life for every member")
    return message


def _parsed(value: Any, hint: Any) -> Any:
    if hint is SnapshotId:
        return SnapshotId(*_parsed(value, tuple[int, ...])) if _is_list(value, 2) else _reject(value)
    if hint in (tuple[int, ...], tuple[str, ...]):
        kind = hint.__args__[0]
        return tuple(_parsed(each, kind) for each in value) if _is_list(value) else _reject(value)
    if hint == str | None:
        return None if value is None else _parsed(value, str)
    if type(value) is not hint or (hint is int and not 0 <= value < 1 << 63):
        return _reject(value)
    return one_line(value)[:_MOST_TEXT] if hint is str else value


def _is_list(value: Any, size: int | None = None) -> bool:
    is_short = isinstance(value, list | tuple) and len(value) <= _MOST_MEMBERS
    return is_short and size in (None, len(value))


def _reject(value: Any) -> Any:
    raise ValueError(f"a message of recovery has a field of a wrong type: {type(value).__name__}")
