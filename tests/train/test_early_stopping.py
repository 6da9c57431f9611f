"""Early stopping: at the same step on all workers, with the best checkpoint, also over a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.pool import Pool
from tests.train.toy import Recorder, ToyTask, run_toy, train_toy
from thinpipe.cli.app import app
from thinpipe.train import loop
from thinpipe.train.checkpoints.best import follow_best
from thinpipe.train.checkpoints.folder import newest
from thinpipe.train.checkpoints.manifest import Progress, read_manifest
from thinpipe.train.metrics import Evaluated
from thinpipe.train.running import RunOptions


def script(monkeypatch: pytest.MonkeyPatch, *metrics: float) -> None:
    """Accuracies of the evaluations, one after another."""
    left = list(metrics)
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluated(loss=1.0, metric=left.pop(0), accuracy=0.0))


def train(folder: Path | None, patience: int | None, **how: Any) -> Recorder:
    running = RunOptions(**{"save": folder, "evaluate_every": 1, "keep": 9} | how)
    return run_toy(None, ToyTask(), running, parallel="none", early_stopping=patience)


@pytest.mark.parametrize(
    ("name", "metrics", "expected"),
    [
        ("accuracy", [0.5, 0.6, 0.6, 0.4], [0, 0, 1, 2]),
        ("perplexity", [5.0, 6.0, 4.0], [0, 1, 0]),
        ("perplexity", [float("nan"), float("inf"), 4.0, float("nan")], [1, 2, 0, 1]),
    ],
)
def test_evaluations_since_the_best(name: Any, metrics: list[float], expected: list[int]) -> None:
    progress, found = Progress(metric_name=name), []
    for metric in metrics:
        progress.evaluated(validation_loss=1.0, metric=metric)
        found.append(progress.evaluations_without_best)
    assert found == expected


def test_the_run_ends_and_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, 0.5, 0.7, 0.6, 0.7, 0.9)
    ears = train(tmp_path, 2)
    assert ears.end is not None
    assert (ears.end.stopped_early, len(ears.steps), ears.end.best_step, ears.end.best_metric) == (2, 4, 2, 0.7)
    assert follow_best(tmp_path / "best").name == "step-00000002"
    assert newest(tmp_path).name == "step-00000004"
    assert ears.end.parameters_sha256 == read_manifest(newest(tmp_path)).progress.parameters_sha256 != ""


def test_without_it_or_with_improvement_a_run_has_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for patience, metrics in ((None, [0.5] * 8), (7, [0.5] * 8), (1, [0.1 * step for step in range(8)])):
        script(monkeypatch, *metrics)
        end = train(None, patience).end
        assert end is not None
        assert (end.steps, end.stopped_early > 0) == (8, patience == 7)  # at the last step of all both are true


def test_a_resumed_run_counts_on_and_an_ended_one_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, 0.5, 0.4)
    train(tmp_path, 3, steps=2)
    script(monkeypatch, 0.4, 0.4)
    ears = train(tmp_path, 3, resume=tmp_path)
    assert [step.step for step in ears.steps] == [3, 4]
    assert train(tmp_path, 3, resume=tmp_path).steps == []  # restarted after its end
    result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "this run is at step 4 of 8 already and has stopped early" in result.output
    script(monkeypatch, *[0.4] * 4)
    assert [step.step for step in train(tmp_path, 9, resume=tmp_path).steps] == [5, 6, 7, 8]  # the user allows more


def test_all_workers_stop_at_the_step_that_the_client_decides(pool: Pool, tmp_path: Path) -> None:
    given = {"compress": "none", "lr": 1e-9, "early_stopping": 2}  # nothing changes, so nothing improves
    ears = pool.run(train_toy, 3, "plain", RunOptions(save=tmp_path, evaluate_every=1), given)
    assert (ears[0].end.steps, ears[0].end.stopped_early) == (3, 2)
    assert len(read_manifest(newest(tmp_path)).parts) == 3
