"""Experiment trackers: what they receive, from the client alone, and what happens if they fail or are missing."""

from __future__ import annotations

import sqlite3
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.lab.runs.made_run import EPOCHS, STEPS, make_epoch, make_plan, make_step, play
from tests.scripts import run_script
from tests.train.test_listeners import read_curves
from thinpipe.cli.app import app
from thinpipe.system.files import OutputError
from thinpipe.train import trackers
from thinpipe.train.events import Listeners
from thinpipe.train.trackers import FOLDER, Trackers

TINY = ("--parallel", "none", "--samples", "64", "--batch-size", "16", "--image-size", "16", "--threads", "1")
RUN = ("-m", "thinpipe", "train", *TINY, "--steps", "2")


class FakeRun:
    """Stands in for a run of trackio."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package named trackio, which accelerate's own tracker calls."""
    made = ModuleType("trackio")
    made.__spec__ = ModuleSpec("trackio", None)
    run, config = FakeRun(), {}
    update = SimpleNamespace(update=lambda values, allow_val_change: config.update(values))
    for name, value in {"init": lambda project: run, "config": update, "run": run, "values": config}.items():
        setattr(made, name, value)
    monkeypatch.setitem(sys.modules, "trackio", made)
    return made


def test_a_tracker_receives_config_steps_and_evaluations(fake: Any) -> None:
    play(Trackers(("trackio",), {"lr": 0.5, "amp": True, "betas": (0.9, 0.99), "model": None}))
    assert fake.values == {"lr": 0.5, "amp": True, "betas": "(0.9, 0.99)", "model": "None"}
    per_step = [(step, values) for step, values in fake.run.logged if "train/loss" in values]
    assert [step for step, _ in per_step] == list(range(1, EPOCHS * STEPS + 1))
    assert per_step[0][1]["train/loss"] == make_step(1).loss
    assert per_step[0][1].keys() >= {"train/lr", "wire/bytes", "speed/samples_per_s"}
    evaluated = [(step, values) for step, values in fake.run.logged if "validation/loss" in values]
    assert [step for step, _ in evaluated] == [STEPS * epoch for epoch in range(1, EPOCHS + 1)]
    assert evaluated[0][1]["validation/accuracy"] == make_epoch(1).validation_metric
    assert fake.run.is_finished


def test_a_tracker_that_fails_later_is_removed_and_the_run_goes_on(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(values: Any, step: int) -> None:
        raise RuntimeError("no network\nmore")

    fake.run.log = fail
    listeners = Listeners([Trackers(("trackio",), {})])
    listeners.planned(make_plan())
    listeners.stepped(make_step(1))
    assert listeners.listeners == []
    assert capsys.readouterr().err == (
        "thinpipe: Trackers stops, the run does not: the tracker trackio fails: no network\n"
    )


def test_a_tracker_that_does_not_start_is_an_error_with_its_reason(fake: Any) -> None:
    def fail(project: str) -> None:
        raise PermissionError("log in first")

    fake.init = fail
    with pytest.raises(OutputError, match="the tracker trackio fails: log in first"):
        Listeners([Trackers(("trackio",), {})]).planned(make_plan())


def test_the_client_of_a_command_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = ["train", *TINY[2:], "--steps", "2", "--report-to", "tensorboard"]
    result = CliRunner().invoke(app, pipeline)
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / FOLDER).iterdir()
    assert len(list(folder.glob("events.*"))) == 1
    assert [step for step, _ in read_curves(folder)["train/loss"]] == [1, 2]


def test_a_missing_or_unknown_tracker_is_one_line_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "wandb" else object())
    for names, message in (
        ("tensorboard,wandb", "--report-to needs the package wandb, which is not installed: pip install wandb"),
        ("wandbb", "--report-to is a list of tensorboard, wandb, trackio; got 'wandbb' (did you mean wandb?)"),
    ):
        result = CliRunner().invoke(app, ["train", *TINY, "--report-to", names])
        assert (result.exit_code, result.stderr) == (2, f"thinpipe: {message}\n")


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(tmp_path: Path) -> None:
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    code, output = run_script(*RUN, "--report-to", "wandb", limit_s=200, **offline)
    assert code == 0, output
    (file,) = tmp_path.rglob("*.wandb")
    content = file.read_bytes()
    assert all(name in content for name in (b"train/loss", b"validation/accuracy", b"compress_forward"))


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_local(tmp_path: Path) -> None:
    code, output = run_script(*RUN, "--report-to", "trackio", limit_s=200, TRACKIO_DIR=str(tmp_path))
    assert code == 0, output
    with sqlite3.connect(tmp_path / "thinpipe.db") as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert {1, 2} <= {step for step, _ in rows}
    assert any("validation/accuracy" in str(metrics) for _, metrics in rows)
