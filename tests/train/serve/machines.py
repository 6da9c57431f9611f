"""Machines of a run with servers on loopback: each has its own key, its own cache and its own files."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.preloaded import Program

LIMIT_S = 150  # a tiny run; nearly all of it is forking and importing on busy cores
TICKET = re.compile(r"thinpipe://\S+")
DIGITS = ["--samples", "64", "--batch-size", "32", "--chunks", "2", "--epochs", "1", "--image-size", "16"]


class Machine:
    """One machine: a folder with its key, and the commands that were typed on it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.commands: list[Command] = []

    def type(
        self,
        *arguments: str,
        command: tuple[str, ...] = ("-m", "thinpipe"),
        environment: Mapping[str, str] = MappingProxyType({}),
        **given: Any,
    ) -> Command:
        environment = {
            **environment,
            "THINPIPE_HOME": str(self.folder / "key"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }
        environment |= {"COLUMNS": "80", "PYTHONPATH": str(Path(__file__).parents[3]), "HF_HUB_OFFLINE": "1"}
        self.commands.append(
            Command([*command, *arguments], self.folder, len(self.commands), os.environ | environment, **given)
        )
        return self.commands[-1]

    def end(self) -> None:
        for each in self.commands:
            each.end()


class Command:
    """A command that runs, and what it has printed so far."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        number: int,
        environment: dict[str, str],
        **given: Any,
    ) -> None:
        self._out, self._err = folder / f"out-{number}", folder / f"err-{number}"
        with self._out.open("w") as out, self._err.open("w") as err:
            options = {"stdout": out, "stderr": err, "cwd": folder, "env": environment} | given
            self.process = Program(*arguments, **options)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit code."""
        return int(self.process.wait(timeout=limit_s))

    def shows(self, pattern: str, limit_s: float = LIMIT_S) -> re.Match[str]:
        """Wait until a pattern is printed."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.out + self.err)
            found.extend([match] if match else [])
            assert match or not ended, f"it has ended without {pattern!r}:\n{self.out}\n{self.err}"
            return bool(match)

        until(look, limit_s, lambda: f"no {pattern!r} in:\n{self.out}\n{self.err}")
        return found[0]

    def ticket(self) -> str:
        return self.shows(TICKET.pattern)[0]

    def end(self) -> None:
        """End the process and all that it has started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                try:
                    self.process.wait(timeout=20)
                except Exception:
                    continue


def until(holds: Callable[[], bool], limit_s: float, what: Callable[[], str]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, what()
        time.sleep(0.1)


@contextmanager
def machines(folder: Path, *names: str) -> Iterator[list[Machine]]:
    """New machines, whose commands are ended afterwards."""
    found = [Machine(folder / name) for name in names]
    try:
        yield found
    finally:
        for each in found:
            each.end()


def children_of(pid: int) -> list[int]:
    """All descendants of a process."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        queue += (own := parents.get(queue.pop(), []))
        found += own
    return found


def listeners_of(pids: list[int]) -> set[str]:
    """The local addresses at which these processes listen for TCP, as ``ss -tlnp`` shows them."""
    inodes = {os.readlink(each) for pid in pids for each in _descriptors(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # LISTEN
                found.add(fields[1])
    return found


def _descriptors(pid: int) -> list[str]:
    found = []
    try:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            try:
                os.readlink(each)
            except FileNotFoundError:
                continue
            found.append(str(each))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found
