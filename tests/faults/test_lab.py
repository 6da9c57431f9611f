"""The lab itself: the same faults for the same seeds, and checks that see what they are there for."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.cases import KINDS, SERVED_KINDS, kind_of, seeds
from tests.faults.checks import causes, check_clean, check_end, check_result
from tests.faults.expected import Expected, Result
from tests.faults.kinds.signals import draw_signal
from tests.faults.runs import Run, Setting
from tests.faults.summary import table

SETTING = Setting(workers=2, codec="8bit")
NOTES = (
    "thinpipe: waiting for worker 1, silent for 10 s (last: step 5, saving)\n"
    "thinpipe: step 6 is damaged: manifest.json: empty; going on from step 5\n"
    "thinpipe: the last checkpoint is saved/step-00000005; go on with: thinpipe train --resume saved\n"
)
CAUSE = "thinpipe: worker 1: killed by signal 9 (SIGKILL); worker 0 ended with it\n"


def ended(folder: Path, code: int, stderr: str) -> Run:
    """A run that ended like this."""
    run = Run(folder, SETTING)
    script = f"import sys; sys.stderr.write({stderr!r}); sys.exit({code})"
    run.command("-c", script)
    assert run.wait(30)
    return run


def problems(run: Run, expected: Expected, *, struck: bool = True) -> list[str]:
    result = Result(0, "signal", "")
    check_end(run, expected, result, struck=struck)
    return [problem.text for problem in result.problems]


def test_a_seed_means_one_fault() -> None:
    assert seeds(7, 3, None) == [7, 8, 9]
    assert {kind_of(seed) for seed in seeds(0, 5, "rest")} == {"rest"}
    assert {kind_of(seed) for seed in range(300)} == set(KINDS)
    assert {kind_of(seed, "serve") for seed in range(300)} == set(SERVED_KINDS)
    first, second = (draw_signal(random.Random("3"), SETTING) for _ in range(2))
    assert (first.words, first.moment, first.expected) == (second.words, second.moment, second.expected)


def test_notes_are_no_causes(tmp_path: Path) -> None:
    run = ended(tmp_path, 1, NOTES + CAUSE)
    assert causes(run.machines[0]) == [CAUSE.strip()]
    assert problems(run, Expected("must not", frozenset({1}), cause=r"worker 1\b.*SIGKILL")) == []


@pytest.mark.parametrize(
    ("code", "stderr", "found"),
    [
        (0, "", "exit code 0 in spite of the fault"),
        (3, CAUSE, "exit code 3, not 1"),
        (1, "", "0 lines say why, not one"),
        (1, CAUSE + CAUSE, "2 lines say why, not one"),
        (1, "thinpipe: worker 0 is gone\n", "the cause is not named"),
        (1, "Traceback (most recent call last):\n" + CAUSE, "a traceback on stderr"),
    ],
)
def test_ends_that_fall_short_are_found(tmp_path: Path, code: int, stderr: str, found: str) -> None:
    expected = Expected("must not", frozenset({1}), cause=r"worker 1\b.*SIGKILL")
    (text,) = problems(ended(tmp_path, code, stderr), expected)
    assert text.startswith(found)


def test_a_run_that_was_over_before_must_have_ended_well(tmp_path: Path) -> None:
    expected = Expected("must not", frozenset({1}))
    assert problems(ended(tmp_path / "good", 0, ""), expected, struck=False) == []
    assert problems(ended(tmp_path / "bad", 1, CAUSE), expected, struck=False) != []


def test_the_log_of_a_server_has_the_cause(tmp_path: Path) -> None:
    log = "thinpipe: client 92K has connected from 127.0.0.1\nthinpipe: run 63c90c6f (train) of vm (92K) starts\n"
    run = ended(tmp_path, 1, log + "thinpipe: run 63c90c6f (train) of vm (92K) has ended: worker 0 is gone: reset\n")
    run.machines = [replace(run.machines[0], is_server=True)]
    assert causes(run.machines[0]) == ["worker 0 is gone: reset"]


def test_leftovers_are_found(tmp_path: Path) -> None:
    run, result = ended(tmp_path, 0, ""), Result(0, "signal", "")
    (run.tmp / "thinpipe-1").mkdir()
    (run.saved / "step-00000003.partial").mkdir(parents=True)
    check_clean(run, result)
    assert [problem.text for problem in result.problems] == [
        "temporary files left: thinpipe-1",
        "half checkpoints left: step-00000003.partial",
    ]


def test_other_parameters_are_a_silent_difference(tmp_path: Path) -> None:
    step = tmp_path / "step-00000008"
    step.mkdir()
    (step / "manifest.json").write_text(json.dumps({"progress": {"parameters_sha256": "ab" * 32}}))
    same, other = Result(0, "rest", ""), Result(1, "rest", "")
    check_result(tmp_path, "ab" * 32, same)
    check_result(tmp_path, "cd" * 32, other)
    assert same.passed
    assert [problem.sort for problem in other.problems] == ["silent difference"]
    assert "1 silent differences" in table([same, other])
    assert table([same, other]).endswith("1 passed, 1 failed")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
def test_processes_that_outlive_their_command_are_found_and_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, SETTING)
    run.command("-c", f"import subprocess; subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])")
    assert run.wait(30)
    (left,) = run.left(0.0)
    assert "time.sleep(60)" in left.command
    run.end()
    assert run.left(5.0) == []


def test_the_command_has_help() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.faults", "--help"], capture_output=True, text=True, check=True)
    assert all(option in done.stdout for option in ("--count", "--seed", "--transport", "--only", "--jobs", "--case"))
