"""The server that forks workers, and this process's temporary folder; light, so that it can start early."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path

from thinpipe.comm.signals import signals_blocked

LAUNCHER = "THINPIPE_LAUNCHER"  # tells the server of workers who has started it
_PREFIX = "thinpipe-"  # of temporary folders
_LONGEST = 50  # characters of a path that leaves room for a socket's name below it


@cache
def import_ahead(*modules: str, **environment: str) -> None:
    """Let the server of workers start now and import these while this process does something else.

    Modules find in the server's ``environment`` what they should know. Only the first call of a
    process starts it; workers import for themselves what it has not.
    """
    temporary_folder()
    multiprocessing.set_forkserver_preload(["thinpipe.launch.preload", *modules])
    ensure_server(**environment)


def ensure_server(**environment: str) -> None:
    """Start the server that forks workers, unless it runs."""
    resource_tracker.ensure_running()  # ahead, since it unblocks signals
    environment[LAUNCHER] = str(os.getpid())
    os.environ |= environment
    try:
        with signals_blocked():
            forkserver.ensure_running()
    finally:
        for name in environment:
            del os.environ[name]


@cache
def temporary_folder() -> str:
    """Return this process's temporary folder. Those of processes that were killed are removed."""
    for path in _place().glob(f"{_PREFIX}*"):
        match = re.match(rf"{_PREFIX}(\d+)-", path.name)
        if match and not Path("/proc", match[1]).exists():
            _remove(path)
    folder = _made_folder()
    # After multiprocessing's own, whose sockets are in it, and by this process alone, not by one that it forked.
    Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-100)
    # Where multiprocessing keeps its socket: one folder is enough, and others can remove it if this process is killed.
    process.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]
    return folder


def _made_folder() -> str:
    """Return a new folder, which this process has locked until it ends."""
    while True:
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_place())
        handle = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks, where nobody else can lock and remove it either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder
        os.close(handle)  # removed by another process between those two lines


def remove_folders_of(process_id: int) -> None:
    """Remove the folders that a process, which was killed, has left."""
    for path in _place().glob(f"{_PREFIX}{process_id}-*"):
        _remove(path)


def _status_of(pid: int | None) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; nothing where there is no such process."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def lives(pid: int | None) -> bool:
    """Return whether a process is there and no zombie."""
    status = _status_of(pid)
    return bool(status) and status[0] not in "ZX"


def parent_of(pid: int | None) -> int | None:
    """Return the parent of a process; None where there is no such process."""
    status = _status_of(pid)
    return int(status[1]) if status else None


def _place() -> Path:
    """A socket's path has at most 107 bytes, and temporary folders of clusters can be longer."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) < _LONGEST else "/tmp")


def _remove(path: Path) -> None:
    """Remove a folder of ours that no process has locked: containers that share it number their processes apart."""
    try:
        if path.stat().st_uid != os.getuid():
            return
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it is no folder, or has gone
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(handle)
