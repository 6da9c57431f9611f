"""Runs are executed, several at a time; each ends with metrics or with a one-line error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.lab.ablation.helpers import FAKE_TRAIN, make_plan, starts
from thinpipe.lab.ablation import runner
from thinpipe.lab.ablation.runner import carry_out, last_error, processes_of, threads_of

pytestmark = pytest.mark.timeout(150)


def test_metrics_come_with_name_and_environment(tmp_path: Path, fake_log: Path) -> None:
    runs = make_plan(tmp_path, 'compress = ["sort:8"]\nseed = [2]').runs
    (result,) = carry_out(runs, train=FAKE_TRAIN)
    assert result.settings == runs[0].settings
    assert result.row is not None
    assert result.row["metric"] == pytest.approx(0.92)
    assert "epochs" not in result.row
    assert (result.metric, result.metric_format) == ("accuracy", ".1%")
    assert result.environment is not None
    assert result.environment["cpu"] == "a processor"
    assert starts(fake_log) == ["sort:6+2 seed 2"]


def test_a_run_that_fails_has_an_error_and_stops_no_other(tmp_path: Path, fake_log: Path) -> None:
    runs = make_plan(tmp_path, 'compress = ["uniform:1,2,8"]').runs
    results = list(carry_out(runs, train=FAKE_TRAIN))
    assert [result.error for result in results] == [
        "the loss is not finite at step 7",
        "ended without finite metrics",
        None,
    ]
    assert [result.failed for result in results] == [True, True, False]


def test_jobs_run_side_by_side_and_never_more(tmp_path: Path, fake_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = make_plan(tmp_path, 'compress = ["uniform:3"]\nseed = [0, 1, 2]').runs
    sleep, beats = time.sleep, []

    def interrupt_when_two_wait(seconds: float) -> None:
        sleep(seconds)
        if fake_log.exists() and fake_log.read_text().count("waiting") >= 2:
            beats.append(None)
            if len(beats) == 20:  # a third one would have started by now
                raise KeyboardInterrupt

    monkeypatch.setattr(runner.time, "sleep", interrupt_when_two_wait)
    with pytest.raises(KeyboardInterrupt):
        list(carry_out(runs, jobs=2, train=FAKE_TRAIN))
    assert sorted(starts(fake_log)) == ["uniform:3 seed 0", "uniform:3 seed 1"]
    assert fake_log.read_text().count("interrupted") == 2  # both could end in peace


def test_workers_of_all_jobs_share_the_cores(tmp_path: Path, fake_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "cores", lambda: 16)
    (run,) = make_plan(tmp_path, 'compress = ["fp16"]', "workers = 2").runs
    assert [threads_of(run, jobs) for jobs in (1, 3, 8, 20)] == [8, 2, 1, 1]
    (result,) = carry_out([run], jobs=3, train=FAKE_TRAIN)
    assert result.threads == 2
    assert fake_log.read_text().splitlines() == ["fp16 seed 0 threads 2"]
    (configured,) = make_plan(tmp_path, "seed = [0]", "threads = 5").runs
    assert threads_of(configured, 8) == 5
    (alone,) = make_plan(tmp_path, "seed = [0]", "workers = 2\nin-process = true").runs
    assert (processes_of(alone), processes_of(run)) == (1, 2)


@pytest.mark.parametrize(
    ("code", "output", "error"),
    [
        (1, "epoch 1\nthinpipe: not finite at step 7\n", "not finite at step 7"),
        (1, "thinpipe: it failed:\n  worker 0: no memory\n  worker 1: alone\n", "it failed: worker 0: no memory"),
        (1, "Traceback:\n  ...\nValueError: bad\n", "exit code 1: ValueError: bad"),
        (-9, "", "killed by signal 9 (SIGKILL)"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, code: int, output: str, error: str) -> None:
    path = tmp_path / "output.txt"
    path.write_text(output)
    assert last_error(code, path) == error


def test_active_runs_are_reported(tmp_path: Path, fake_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "REPORT_S", 0.01)
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if line.endswith("step 1 of 9"):
            raise InterruptedError

    runs = make_plan(tmp_path, 'compress = ["uniform:3"]').runs
    with pytest.raises(InterruptedError):
        list(carry_out(runs, train=FAKE_TRAIN, report=report))
    assert all(line.startswith(f"{runs[0].name}: running for 0 min; ") for line in lines)
    assert {line.rpartition("; ")[2] for line in lines} <= {"no output yet", "step 1 of 9"}
    assert "interrupted" in fake_log.read_text()  # no run outlives it
