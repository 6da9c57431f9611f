"""Programs of tests that are forked are what Python would have started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.preloaded import PLACE, ROOT, Program

SAYS = """
import json, os, sys
facts = {"argv": sys.argv, "first": sys.path[0], "folder": os.getcwd(), "own": os.getsid(0) == os.getpid()}
facts |= {"main": __name__, "env": os.environ.get("WHO"), "in": sys.stdin.read()}
print(json.dumps(facts))
sys.exit(3)
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.parametrize("how", ["script", "-m", "-c"])
def test_forked_or_started_a_program_finds_the_same(how: str, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    command = {"script": [str(tmp_path / "says.py")], "-m": ["-m", "says"], "-c": ["-c", SAYS]}[how] + ["--more", "2"]
    given = {**PIPES, "cwd": tmp_path, "env": {"WHO": "me"}}
    forked = Program(*command, **given)
    started = subprocess.Popen([sys.executable, *command], **given, text=True, start_new_session=True)
    answers = []
    for process in (forked, started):
        out, err = process.communicate("words", timeout=100)
        assert (process.returncode, err) == (3, "")
        answers.append(json.loads(out))
    assert answers[0] == answers[1]
    assert answers[0]["env"] == "me"


def test_a_signal_and_an_exception_end_it_as_they_end_python() -> None:
    killed = Program("-c", "print('!', flush=True); input()", **PIPES)
    assert killed.stdout is not None
    assert killed.stdout.read(1) == "!"
    assert killed.poll() is None
    killed.kill()
    assert killed.wait(30) == -signal.SIGKILL
    failed = Program("-c", "1 / 0", **PIPES)
    _, err = failed.communicate(timeout=30)
    assert failed.returncode == 1
    assert err.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_the_server_and_its_folder_end_with_the_parent() -> None:
    code = "from tests.preloaded import PLACE, start; import os; start(); print(os.environ[PLACE], flush=True); input()"
    environment = {name: value for name, value in os.environ.items() if name != PLACE} | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], **PIPES, env=environment, text=True) as starter:
        assert starter.stdout is not None
        place = Path(starter.stdout.readline().strip())
        assert place.exists()
        starter.kill()
    while place.parent.exists():  # pytest's limit ends a test that would wait for ever
        time.sleep(0.05)
