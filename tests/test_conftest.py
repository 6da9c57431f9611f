"""Tests of signals pass however pytest is started: under nohup, and in the background of a script."""

from __future__ import annotations

import signal

from tests.scripts import run_script

# What nohup and bash do before they start a program.
IGNORING = """
import signal, sys
import pytest

for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.exit(pytest.main(["-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
TEST = "tests/test_signals.py::test_while_it_is_imported_nothing_is_lost_and_nothing_left"


def test_signals_that_are_ignored_by_pytest_are_not_by_the_programs_that_tests_start() -> None:
    names = ("interrupted", "ended by SIGHUP")
    tests = [f"{TEST}[{number}-{said}]" for number, said in zip((signal.SIGINT, signal.SIGHUP), names, strict=True)]
    code, output = run_script("-c", IGNORING, *tests, fresh=True)
    assert (code, "2 passed" in output) == (0, True), output
