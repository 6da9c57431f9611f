"""thinpipe ablate as a user meets it: made-up trainings, broken off and taken up again; and once real ones."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.lab.ablation.helpers import FAKE_TRAIN, starts, write_plan
from tests.plots import drawn, shown
from tests.scripts import ROOT, run_script
from thinpipe.cli.app import app
from thinpipe.lab.ablation import runner
from thinpipe.lab.ablation.plan import OPTIONS
from thinpipe.lab.records.record import Record

pytestmark = pytest.mark.timeout(120)
FAKE_ABLATE = ("-m", "tests.lab.ablation.ablate_with_fake", "ablate")


@pytest.fixture
def _fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "carry_out", partial(runner.carry_out, train=FAKE_TRAIN))
    monkeypatch.chdir(tmp_path)


def ablate(*options: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["ablate", *map(str, options)])


@pytest.mark.usefixtures("_fake")
def test_ends_with_table_record_page_and_plot(tmp_path: Path, fake_log: Path) -> None:
    plan = write_plan(tmp_path, 'compress = ["none", "sort:8"]\nseed = [0, 1, 2]')
    outputs = [tmp_path / name for name in ("a.json", "a.md", "a.png")]
    with drawn() as figures:
        result = ablate(plan, "--jobs", 3, "--json", outputs[0], "--markdown", outputs[1], "--plot", outputs[2])
    assert result.exit_code == 0, result.output
    assert "91.0% ± 1.0%" in result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == 6
    assert re.fullmatch(r"\[6/6\] digits .* seed \d: accuracy 9\d\.0%, \d+ s", lines[-1])
    assert "3 at a time, 2 processes each, OMP_NUM_THREADS=" in result.stderr
    assert [row["codec"] for row in Record.read(outputs[0]).rows] == ["none", "sort:6+2"]
    assert "| sort:6+2 |" in outputs[1].read_text()
    assert outputs[2].read_bytes().startswith(b"\x89PNG")
    assert {panel: lines["sort"] for panel, lines in shown(figures[0]).items()} == {
        panel: [(6.0, pytest.approx(91.0))] for panel in ("digits", "digits, close to none")
    }
    assert (tmp_path / "plan.results.jsonl").exists()

    again = ablate(plan)
    assert again.exit_code == 0
    assert again.stdout == result.stdout
    assert len(starts(fake_log)) == 6


@pytest.mark.usefixtures("_fake")
def test_failed_runs_are_shown_exit_1_and_are_retried_only_on_request(tmp_path: Path, fake_log: Path) -> None:
    plan = write_plan(tmp_path, 'compress = ["uniform:1,8"]\nseed = [0, 1]')
    result = ablate(plan)
    assert result.exit_code == 1
    assert "0 of 2, 2 failed" in result.stdout
    assert "the loss is not finite at step 7" in result.stdout
    assert "--retry-failed" in result.stderr
    assert len(starts(fake_log)) == 4
    assert ablate(plan).exit_code == 1
    assert len(starts(fake_log)) == 4
    assert ablate(plan, "--retry-failed").exit_code == 1
    assert starts(fake_log)[4:] == ["uniform:1 seed 0", "uniform:1 seed 1"]


@pytest.mark.usefixtures("_fake")
def test_only_and_dry_run_select_and_list(tmp_path: Path, fake_log: Path) -> None:
    plan = write_plan(tmp_path, 'compress = ["none", "sort:8", "kmeans:4"]\nseed = [0, 1]')
    assert ablate(plan, "--only", "sort:8", "--only", "none seed 1").exit_code == 0
    assert starts(fake_log) == ["none seed 1", "sort:6+2 seed 0", "sort:6+2 seed 1"]
    listed = ablate(plan, "--dry-run").stdout
    assert re.findall(r"^(\d)  (\w+) +digits (.*)$", listed, re.MULTILINE) == [
        ("1", "pending", "none seed 0"),
        ("2", "done", "none seed 1"),
        ("3", "done", "sort:6+2 seed 0"),
        ("4", "done", "sort:6+2 seed 1"),
        ("5", "pending", "kmeans:4 seed 0"),
        ("6", "pending", "kmeans:4 seed 1"),
    ]
    assert "thinpipe train --task digits --seed 0 --compress kmeans:4" in listed
    assert len(starts(fake_log)) == 3
    nothing = ablate(plan, "--only", "poetry")
    assert nothing.exit_code == 2
    assert "no run has 'poetry' in its name" in nothing.stderr


@pytest.mark.usefixtures("_fake")
def test_a_changed_plan_runs_anew_and_leaves_the_old_results_out(tmp_path: Path, fake_log: Path) -> None:
    matrix = 'compress = ["none"]\nseed = [0, 1]'
    assert ablate(write_plan(tmp_path, matrix, "epochs = 2")).exit_code == 0
    result = ablate(write_plan(tmp_path, matrix, "epochs = 3"))
    assert len(starts(fake_log)) == 4
    assert "2 results in it have other settings than the plan, and are ignored" in result.stderr
    assert "2 of 2" in result.stdout
    assert ablate(write_plan(tmp_path, matrix, "epochs = 2")).exit_code == 0
    assert len(starts(fake_log)) == 4  # they are still there


@pytest.mark.usefixtures("_fake")
@pytest.mark.parametrize(
    ("matrix", "options", "message"),
    [
        ("seeds = [0]", [], f"[matrix] has no seeds; there is: {', '.join(OPTIONS)}"),
        ("seed = [0]", ["--set", "epochs"], "--set takes"),
        ("seed = [0]", ["--plot", "a.jpg"], "--plot writes PNG"),
        ("workers = [2, 100]", ["--dry-run"], "the run 'digits 8bit workers 100 seed 0': "),
        ("seed = [0]", ["--dry-run", "--set", "task=texts", "--set", "data=/nowhere.csv"], "/nowhere.csv is not there"),
        ("seed = [0]", ["--set", "lr=inf"], "--lr is above 0 and at most 1e+06; got inf"),
        ("seed = [0]", ["--results", "/dev/null"], "it is a device, not a file"),
        ("seed = [0]", ["--results", "/nowhere/results.jsonl"], "results cannot be written there"),
    ],
)
def test_invalid_plans_are_one_line(tmp_path: Path, matrix: str, options: list[str], message: str) -> None:
    result = ablate(write_plan(tmp_path, matrix), *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_ctrl_c_ends_runs_keeps_results_and_prints_how_to_resume(tmp_path: Path, fake_log: Path) -> None:
    plan = write_plan(tmp_path, 'compress = ["none", "uniform:3"]')
    results = tmp_path / "results.jsonl"
    code, output = run_script(
        *FAKE_ABLATE,
        str(plan),
        "--results",
        str(results),
        interrupt_when=lambda: fake_log.exists() and "waiting" in fake_log.read_text(),
    )
    assert code == 130, output
    assert f"interrupted; 1 of 2 runs are in {results}" in output
    assert f"--results {results}" in output.split("Go on with the same command:")[1]
    assert "interrupted" in fake_log.read_text()
    assert len(results.read_text().splitlines()) == 1


def test_a_killed_ablation_ends_its_runs_and_resumes(tmp_path: Path, fake_log: Path) -> None:
    plan = write_plan(tmp_path, 'compress = ["none", "fp16", "uniform:3"]')
    options = [*FAKE_ABLATE, str(plan), "--results", str(tmp_path / "results.jsonl")]
    process = subprocess.Popen(
        [sys.executable, *options], env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    )
    while "waiting" not in (fake_log.read_text() if fake_log.exists() else ""):
        assert process.poll() is None
        time.sleep(0.05)
    (training,) = [int(word) for word in _children(process.pid)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    while Path(f"/proc/{training}").exists():
        time.sleep(0.05)

    code, output = run_script(*options, "--only", "none", "--only", "fp16")
    assert code == 0, output
    assert "0 runs to do, 2 already done" in output
    assert starts(fake_log) == ["none seed 0", "fp16 seed 0", "uniform:3 seed 0"]


def _children(parent: int) -> list[str]:
    return [word for path in Path(f"/proc/{parent}/task").glob("*/children") for word in path.read_text().split()]


def test_real_trainings_differ_by_their_codec_alone(tmp_path: Path) -> None:
    tiny = 'task = "digits"\nsamples = 32\nbatch-size = 16\nchunks = 2\nimage-size = 16\nsteps = 2'
    plan = write_plan(tmp_path, 'compress = ["none", "fp16"]', tiny)
    files = ["--results", str(tmp_path / "results.jsonl"), "--json", str(tmp_path / "ablation.json")]
    code, output = run_script("-m", "thinpipe", "ablate", str(plan), "--jobs", "2", *files, limit_s=100)
    assert code == 0, output
    plain, halved = Record.read(tmp_path / "ablation.json").rows
    assert (plain["codec"], halved["codec"]) == ("none", "fp16")
    checksums = plain["wire_ratio"] - 1.0  # eight bytes a message, the same for both
    assert 0 < checksums < 2e-4
    assert halved["wire_ratio"] == pytest.approx(0.5 + checksums, abs=1e-12)
    tensors_mb = plain["wire_mb_per_step"] / (1.0 + checksums)
    assert 0 < halved["wire_mb_per_step"] == pytest.approx(tensors_mb * (0.5 + checksums))
    kept = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["figures"]["steps"] for line in kept] == [2, 2]
    assert {line["threads"] for line in kept} == {1}


def test_help_fits_80_columns() -> None:
    output = ablate("--help").output
    assert "--retry-failed" in output
    assert max(map(len, output.splitlines())) <= 80
