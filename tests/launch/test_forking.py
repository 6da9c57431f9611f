"""Signals to the server that forks workers, before it is ready and after, and to workers that are not ready yet."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.scripts import ROOT

ENDING = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
# In the place of what it imports, which takes seconds.
HELD = """
import importlib, os, signal, sys
importlib.import_module = lambda name: (print("there", flush=True), sys.stdin.readline())
"""
SERVER = f"""{HELD}
import thinpipe.launch.preload
"""
WORKER = f"""{HELD}
sys.stdin = open(os.devnull)
import thinpipe.launch.preload
process = os.fork()
if process == 0:
    print("forked", flush=True)
    while True:
        signal.pause()
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
# An interpreter reads this before anything else.
CUSTOM = """
import os, sys
if any("forkserver import main" in word for word in sys.orig_argv):
    print(os.getpid(), flush=True)
    open(os.environ["HELD"]).readline()
"""
LAUNCHER = """
import os
from multiprocessing import forkserver
from thinpipe.launch.forking import import_ahead
import_ahead()
print(os.waitstatus_to_exitcode(os.waitpid(forkserver._forkserver._forkserver_pid, 0)[1]), flush=True)
"""


@contextmanager
def start(code: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A program in a session of its own, of which nothing is left."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@ENDING
def test_a_server_that_imports_ends_silently(number: signal.Signals) -> None:
    with start(SERVER) as server:
        assert line_of(server) == "there"
        server.send_signal(number)
        assert server.communicate(timeout=30) == ("", "")
    assert server.returncode == 128 + number


def test_a_server_keeps_ignored_signals_ignored() -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with start(ignoring + SERVER) as server:
        assert line_of(server) == "there"
        server.send_signal(signal.SIGHUP)
        assert server.communicate("go on\n", timeout=30) == ("", "")
    assert server.returncode == 0


@ENDING
def test_a_worker_that_is_not_ready_ends_and_its_server_reports_it(number: signal.Signals) -> None:
    with start(WORKER) as server:
        assert [line_of(server), line_of(server)] == ["there", "forked"]
        os.killpg(server.pid, number)
        assert server.communicate(timeout=30) == (f"{128 + number}\n", "")
    assert server.returncode == 0


@ENDING
def test_a_server_whose_interpreter_starts_ends_silently(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CUSTOM)
    held = tmp_path / "held"
    os.mkfifo(held)
    with start(LAUNCHER, PYTHONPATH=f"{tmp_path}:{ROOT}", HELD=str(held)) as launcher:
        os.kill(int(line_of(launcher)), number)
        with held.open("r+b", buffering=0) as both_ends:  # so that this never waits
            both_ends.write(b"\n")
            assert launcher.communicate(timeout=30) == (f"{128 + number}\n", "")
    assert launcher.returncode == 0


def test_a_server_whose_launcher_is_killed_leaves_no_folder(tmp_path: Path) -> None:
    """Which no worker can remove: there is none yet."""
    (tmp_path / "sitecustomize.py").write_text(CUSTOM)
    held = tmp_path / "held"
    os.mkfifo(held)
    short = Path(tempfile.mkdtemp(dir="/tmp"))  # for a socket's path
    try:
        with start(LAUNCHER, PYTHONPATH=f"{tmp_path}:{ROOT}", HELD=str(held), TMPDIR=str(short)) as launcher:
            server = int(line_of(launcher))
            assert [path.name.split("-")[1] for path in short.iterdir()] == [str(launcher.pid)]
            launcher.kill()
            launcher.wait()
            ended = os.pidfd_open(server)  # before it may end
            with held.open("r+b", buffering=0) as both_ends:
                both_ends.write(b"\n")
                assert select.select([ended], [], [], 30)[0]
            os.close(ended)
        assert not list(short.iterdir())
    finally:
        shutil.rmtree(short)


FOLDER = """
from thinpipe.launch.forking import temporary_folder
temporary_folder()
print("made", flush=True)
input()
"""
NOBODY = 2**31 - 1  # no process has this number


def test_folders_of_killed_processes_are_removed_and_no_locked_ones() -> None:
    """Containers that share a folder do not see each other's processes."""
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        for name in ("locked", "left"):
            (short / f"thinpipe-{NOBODY}-{name}").mkdir()
        (short / f"thinpipe-{NOBODY}-file").touch()
        (short / f"thinpipe-{NOBODY}-link").symlink_to(short)
        os.mkfifo(short / f"thinpipe-{NOBODY}-fifo")
        held = os.open(short / f"thinpipe-{NOBODY}-locked", os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        with start(FOLDER, TMPDIR=str(short)) as process:
            assert line_of(process) == "made"
            (own,) = short.glob(f"thinpipe-{process.pid}-*")
            kept = {path.name.rpartition("-")[2] for path in short.glob(f"thinpipe-{NOBODY}-*")}
            assert kept == {"locked", "file", "link", "fifo"}
            mine = os.open(own, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process.kill()
            process.wait()
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(mine)
        os.close(held)
        with start(FOLDER, TMPDIR=str(short)) as process:
            assert line_of(process) == "made"
            assert not own.exists()
            assert not (short / f"thinpipe-{NOBODY}-locked").exists()
    finally:
        shutil.rmtree(short)
