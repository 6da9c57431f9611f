"""How the program ends: signals before and after a verb's work, and a full disk, are one line or nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT

PROGRAM = """
import atexit, sys, time
from thinpipe import __main__
from thinpipe.cli import app as cli

cli.VERBS["diff"] = ("sleeping:verb", "")
sys.modules["sleeping"] = sys.modules["__main__"]


def verb() -> None:
    print("there", flush=True)
    time.sleep(SECONDS)


@atexit.register
def tidy_up() -> None:
    print("done", flush=True)
    sys.stdin.read()  # until the signal is on its way


sys.argv = ["thinpipe", "diff"]
__main__.main()
"""
# Stands where the command line's library does, and goes on whatever comes: as libraries do that try an import.
IMPORTED = """
from thinpipe.launch.forking import temporary_folder

temporary_folder()
try:
    print("there", flush=True)
    input()
except BaseException:
    pass
"""
WORDS = [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM"), (signal.SIGHUP, "ended by SIGHUP")]


def signalled(number: int, *command: str, lines: int = 1, **env: str) -> tuple[str, int]:
    """Return stderr and exit code of a program that receives a signal after a number of lines."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(lines)] == ["there\n", "done\n"][:lines]
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    return said, process.returncode


@pytest.mark.parametrize(("number", "words"), WORDS)
def test_one_line_and_the_code_that_shells_expect(number: int, words: str) -> None:
    ended = signalled(number, "-c", PROGRAM.replace("SECONDS", "60"))
    assert ended == (f"thinpipe: {words}\n", 128 + number)


@pytest.mark.parametrize("arguments", [["--version"], ["models"]])
def test_a_full_disk_behind_stdout(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "thinpipe", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (ended.stderr, ended.returncode) == ("thinpipe: OSError: [Errno 28] No space left on device\n", 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_after_its_work_a_program_ends_well(number: int) -> None:
    assert signalled(number, "-c", PROGRAM.replace("SECONDS", "0"), lines=2) == ("", 0)


@pytest.mark.parametrize(("number", "words"), WORDS)
def test_while_it_is_imported_nothing_is_lost_and_nothing_left(number: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(IMPORTED)
    (tmp_path / "tmp").mkdir()
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(tmp_path / "tmp")}
    assert signalled(number, "-m", "thinpipe", "--help", **env) == (f"thinpipe: {words}\n", 128 + number)
    assert not list((tmp_path / "tmp").iterdir())
