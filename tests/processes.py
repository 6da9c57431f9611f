"""The processes of a session, as /proc tells of them, and the workers of this one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One process at one moment."""

    pid: int
    parent: int
    session: int
    started: int  # ticks since the machine was started
    cpu_s: float  # that it has computed
    state: str  # R, S, T ...
    command: str

    @property
    def age(self) -> tuple[int, int]:
        """Sorts the oldest first; numbers tell apart those of one tick."""
        return self.started, self.pid


def processes_of(session: int, naming: str | None = None) -> list[Process]:
    """The processes of a session that still run, and those whose command has a text in it; oldest first."""

    def belongs(process: Process) -> bool:
        return process.session == session or (naming is not None and naming in process.command)

    return sorted(filter(belongs, _all()), key=lambda each: each.age)


def local_workers() -> list[str]:
    """The workers of thinpipe that this process has started and that still run."""
    return [each.name for each in multiprocessing.active_children() if each.name.startswith("thinpipe-worker")]


def _all() -> Iterator[Process]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            yield Process(
                pid=int(stat.parent.name),
                parent=int(fields[1]),
                session=int(fields[3]),
                started=int(fields[19]),
                cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
                state=fields[0],
                command=command,
            )
