"""The server that forks workers, and this process's temporary folder; few imports, so that it starts early."""

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

LAUNCHER = "THINPIPE_LAUNCHER"  # the process id of the launcher, for the server that forks workers
_PREFIX = "thinpipe-"  # of temporary folders
_LONGEST = 50  # characters of a path that leaves space for a socket's name below it


@cache
def import_ahead(*modules: str, **environment: str) -> None:
    """Start the server that forks workers now, and let it import modules while this process continues.

    ``environment`` is added to the server's environment variables. Only the first call of a process starts it; workers
    import the other modules that they need.
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
    """Return this process's temporary folder; remove those of processes that were killed."""
    for path in _place().glob(f"{_PREFIX}*"):
        match = re.match(rf"{_PREFIX}(\d+)-", path.name)
        if match and not Path("/proc", match[1]).exists():
            _remove(path)
    folder = _made_folder()
    # After multiprocessing's own finalizers, whose sockets are in it, and only by this process, not by forked ones.
    Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-100)
    # multiprocessing puts its socket here: with one folder, other runs can remove it if this process is killed.
    process.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]
    return folder


def _made_folder() -> str:
    """Return a new folder that this process keeps locked until it exits."""
    while True:
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_place())
        handle = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks, where no other process can lock and remove it either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder
        os.close(handle)  # removed by another process between those two lines


def remove_folders_of(process_id: int) -> None:
    """Remove the folders left by a killed process."""
    for path in _place().glob(f"{_PREFIX}{process_id}-*"):
        _remove(path)


def _status_of(pid: int | None) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def lives(pid: int | None) -> bool:
    """Return True if a process exists and is not a zombie."""
    status = _status_of(pid)
    return bool(status) and status[0] not in "ZX"


def parent_of(pid: int | None) -> int | None:
    """Return the parent of a process; None if there is no such process."""
    status = _status_of(pid)
    return int(status[1]) if status else None


def _place() -> Path:
    """Return the parent of temporary folders, a short path: a socket's path has at most 107 bytes."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) < _LONGEST else "/tmp")


def _remove(path: Path) -> None:
    """Remove our own folder unless a process has locked it: containers that share it have separate process ids."""
    try:
        if path.stat().st_uid != os.getuid():
            return
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # not a folder, or already removed
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(handle)
