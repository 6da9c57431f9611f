"""A signal before a verb has begun its work ends the program with one line; after it, it changes nothing."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, time
from thinpipe import cli

cli.VERBS["diff"] = ("sleeping:verb", "")
sys.modules["sleeping"] = sys.modules["__main__"]


def verb() -> None:
    print("there", flush=True)
    time.sleep(SECONDS)


@atexit.register
def tidy_up() -> None:
    print("done", flush=True)
    time.sleep(2)


sys.argv = ["thinpipe", "diff"]
cli.main()
"""


def start(seconds: float) -> subprocess.Popen[str]:
    program = PROGRAM.replace("SECONDS", str(seconds))
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM"), (signal.SIGHUP, "ended by SIGHUP")],
)
def test_one_line_and_the_code_that_shells_expect(number: int, words: str) -> None:
    process = start(60)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (said, process.returncode) == (f"thinpipe: {words}\n", 128 + number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_after_its_work_a_program_ends_well(number: int) -> None:
    process = start(0)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["there\n", "done\n"]
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (said, process.returncode) == ("", 0)
