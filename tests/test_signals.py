"""A signal before a verb has begun its work, or after it, ends the program with one line."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import sys, time
from thinpipe import cli

cli.VERBS["diff"] = ("sleeping:verb", "")
sys.modules["sleeping"] = sys.modules["__main__"]


def verb() -> None:
    print("there", flush=True)
    time.sleep(60)


sys.argv = ["thinpipe", "diff"]
cli.main()
"""


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM"), (signal.SIGHUP, "ended by SIGHUP")],
)
def test_one_line_and_the_code_that_shells_expect(number: int, words: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (said, process.returncode) == (f"thinpipe: {words}\n", 128 + number)
