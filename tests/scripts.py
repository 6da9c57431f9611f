"""Scripts run as a user runs them, with workers of their own, none of which may be left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from subprocess import PIPE, STDOUT

from tests.preloaded import ROOT, Program
from tests.processes import processes_of

LIMIT_S = 150  # of which importing torch in three processes on two busy cores may take a fifth


def run_script(
    *command: str,
    limit_s: float = LIMIT_S,
    fresh: bool = False,
    interrupt_when: Callable[[], bool] | None = None,
    interrupt_with: signal.Signals = signal.SIGINT,
    **env: str,
) -> tuple[int, str]:
    """Exit code and output of a script in a session of its own; when it is over, so must be all its workers.

    ``interrupt_when`` says when to press Ctrl-C, which reaches the script and its workers alike; other signals, as of
    ``kill``, reach the script alone. ``fresh``: in an interpreter that has imported nothing. ``env`` is added to the
    environment.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    if fresh:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True, env=env
        )
    else:
        process = Program(*command, stdout=PIPE, stderr=STDOUT, env=env)
    until = time.monotonic() + limit_s
    try:
        if interrupt_when is not None:
            while not interrupt_when() and time.monotonic() < until and process.poll() is None:
                time.sleep(0.05)
            (os.killpg if interrupt_with == signal.SIGINT else os.kill)(process.pid, interrupt_with)
        output, _ = process.communicate(timeout=until - time.monotonic())
    finally:
        patience = time.monotonic() + 5  # the kernel takes a moment to clear a process away
        while (left := running(process.pid)) and time.monotonic() < patience:
            time.sleep(0.1)
        if left:
            os.killpg(process.pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}\n{output}"
    return process.returncode, output


def running(session: int) -> list[str]:
    """The commands of the processes of a session."""
    return [process.command for process in processes_of(session)]
