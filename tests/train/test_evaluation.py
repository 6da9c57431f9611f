"""Evaluating a run gives what the run's own evaluation did, through a pipeline or in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.pool import Pool
from tests.train.tasks.written import write_language_model
from tests.train.toy import Recorder, run_toy, world_in
from thinpipe.train.evaluation import EvaluationResult, Part, evaluate_on_worker
from thinpipe.train.resolve import resolve_evaluation
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.tasks import task

TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60


def train_here(group: dist.ProcessGroup, folder: Path, given: dict[str, Any] | None = None) -> Recorder:
    options = {"model": str(folder / "model"), "data": str(folder / "text.txt"), "tokens": 16, "samples": 32}
    small = {"batch_size": 8, "chunks": 2, "lr": 0.01, "compress": "none"}
    return run_toy(group, task("lm"), RunOptions(save=folder / "run"), **options | small | (given or {}))


def evaluate_here(
    group: dist.ProcessGroup | None, folder: Path, given: dict[str, Any], part: Part = "validation"
) -> EvaluationResult:
    settings = resolve_evaluation(folder / "run", {"compress": None, "workers": world_in(group).workers, **given})
    return evaluate_on_worker(world_in(group), settings, folder / "run", None, part)


def test_of_a_run(pool: Pool, tmp_path: Path) -> None:
    write_language_model(tmp_path / "model", TEXT)
    (tmp_path / "text.txt").write_text(TEXT)
    end = pool.run(train_here, 2, tmp_path)[0].end
    again = pool.run(evaluate_here, 3, tmp_path, {})[0]
    assert (again.found.loss, again.found.metric) == pytest.approx((end.validation_loss, end.metric), rel=1e-6)
    assert again.found.bits_per_byte == pytest.approx(end.bits_per_byte, rel=1e-6)
    assert 0 < again.found.accuracy < 1
    alone = evaluate_here(None, tmp_path, {"parallel": "none"})
    assert alone.found.loss == pytest.approx(end.validation_loss, rel=1e-6)
    assert alone.wire_bytes == 0
    coded = pool.run(evaluate_here, 2, tmp_path, {"compress": "gauss:2"})[0]
    assert coded.found.loss != pytest.approx(end.validation_loss, rel=1e-4)
    assert 0 < 8 * coded.wire_bytes < again.wire_bytes
    with pytest.raises(ValueError, match=r"axes:2\.5 learns while a model is trained through it, and this one was not"):
        resolve_evaluation(tmp_path / "run", {"compress": "2bit"})
    seen = evaluate_here(None, tmp_path, {"parallel": "none"}, "train")
    assert seen.samples == 32
    assert seen.found.loss != alone.found.loss


def test_with_the_axes_that_links_had_learned(pool: Pool, tmp_path: Path) -> None:
    write_language_model(tmp_path / "model", TEXT)
    (tmp_path / "text.txt").write_text(TEXT)
    end = pool.run(train_here, 2, tmp_path, {"compress": None, "compress_forward": "axes:2+now", "epochs": 2})[0].end
    again = pool.run(evaluate_here, 2, tmp_path, {})[0]
    assert again.found.loss == end.validation_loss
    exact = pool.run(evaluate_here, 2, tmp_path, {"compress": "none"})[0]
    assert exact.found.loss != again.found.loss
    assert again.wire_bytes < 0.2 * exact.wire_bytes


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run is a folder that a run was saved in"):
        resolve_evaluation(tmp_path, {"compress": None})
