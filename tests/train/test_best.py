"""The best checkpoint: saved when validation improves, spared when older ones go, and found under DIR/best."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.train.toy import Recorder, ToyTask, run_toy, train_toy
from thinpipe.train import loop
from thinpipe.train.checkpoints import saving
from thinpipe.train.checkpoints.best import follow_best, improves, mark_best
from thinpipe.train.checkpoints.folder import checkpoints, newest
from thinpipe.train.checkpoints.manifest import Progress, manifest_of, read_facts, read_manifest
from thinpipe.train.metrics import Evaluated
from thinpipe.train.running import RunOptions

Train = Callable[..., Recorder]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, float]], None]:
    """Evaluate every 2 steps of 8, with these accuracies by step; 0 at all others."""

    def script(metrics: dict[int, float]) -> None:
        left = [metrics.get(step, 0.0) for step in range(2, 9, 2)]
        monkeypatch.setattr(
            loop, "evaluate", lambda *_: Evaluated(loss=1.0, metric=left.pop(0), accuracy=0.0, bits_per_byte=None)
        )

    return script


def train(folder: Path, **how: Any) -> Recorder:
    running = RunOptions(**{"save": folder, "save_every": 2, "evaluate_every": 2, "keep": 1} | how)
    return run_toy(None, ToyTask(), running, parallel="none")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "metric", "best", "expected"),
    [
        ("accuracy", 0.5, None, True),
        ("accuracy", 0.6, 0.5, True),
        ("accuracy", 0.5, 0.5, False),  # the first of equals stays
        ("accuracy", 0.4, 0.5, False),
        ("perplexity", 4.0, 5.0, True),
        ("perplexity", 6.0, 5.0, False),
        ("perplexity", float("inf"), None, False),
        ("matthews", float("nan"), None, False),
        ("matthews", float("nan"), -0.5, False),
    ],
)
def test_comparison_of_metrics(name: Any, metric: float, best: float | None, expected: bool) -> None:
    progress = Progress(metric_name=name, metric=metric, best=None if best is None else (3, best))
    assert improves(progress) is expected


def test_the_best_is_kept_in_addition_to_the_newest(tmp_path: Path, scripted: Any) -> None:
    scripted({2: 0.3, 4: 0.9, 6: 0.5, 8: 0.7})
    end = train(tmp_path).end
    assert names(tmp_path) == ["best", "step-00000004", "step-00000008"]
    assert os.readlink(tmp_path / "best") == "step-00000004"
    assert follow_best(tmp_path / "best") == tmp_path / "step-00000004"
    assert read_manifest(tmp_path / "best").progress.metric == 0.9
    assert read_manifest(newest(tmp_path)).progress.best == (4, 0.9)
    assert end is not None
    assert (end.best_step, end.best_metric, end.metric) == (4, 0.9, 0.7)


def test_an_improvement_is_saved_when_no_save_was_due(tmp_path: Path, scripted: Any) -> None:
    scripted({2: 0.3, 4: 0.9, 6: 0.5})
    recorder = train(tmp_path, save_every=5, keep=9)
    assert [Path(path).name[-1] for path in recorder.paths] == ["2", "4", "5", "8"]
    scripted({2: 0.3, 4: 0.9, 6: 0.5})
    recorder = train(tmp_path / "other", save_every=5, keep=9, keep_best=False)
    assert [Path(path).name[-1] for path in recorder.paths] == ["5", "8"]
    assert "best" not in names(tmp_path / "other")


def test_a_resumed_run_spares_the_best_until_there_is_a_better_one(tmp_path: Path, scripted: Any) -> None:
    scripted({2: 0.9, 4: 0.5})
    train(tmp_path, steps=4)
    mark_best(tmp_path, None)  # as after a kill between renaming the checkpoint and the link
    scripted({2: 0.6})  # of step 6
    train(tmp_path, steps=6, resume=tmp_path)
    assert names(tmp_path) == ["best", "step-00000002", "step-00000006"]
    scripted({2: 0.95})
    train(tmp_path, resume=tmp_path)
    assert names(tmp_path) == ["best", "step-00000008"]
    assert os.readlink(tmp_path / "best") == "step-00000008"


def test_from_the_best_into_another_folder_which_has_a_best_of_its_own(tmp_path: Path, scripted: Any) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    scripted({2: 0.3, 4: 0.9})
    train(first)
    scripted({2: 0.7, 4: 0.8})
    train(second, resume=follow_best(first / "best"))
    assert names(first) == ["best", "step-00000004", "step-00000008"]
    assert names(second) == ["best", "step-00000008"]
    assert read_manifest(second / "best").progress.best == (8, 0.8)


def test_a_best_that_could_not_be_saved_leaves_the_one_before(
    tmp_path: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saving.write_pieces

    def write_or_not(path: Path, pieces: Any) -> Any:
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full")
        return write(path, pieces)

    monkeypatch.setattr(saving, "write_pieces", write_or_not)
    scripted({2: 0.3, 4: 0.9, 6: 0.5, 8: 0.4})
    recorder = train(tmp_path)
    assert [step for step, _ in recorder.problems] == [4]
    assert names(tmp_path) == ["best", "step-00000006", "step-00000008"]  # 0.5 is better than the 0.3 that was saved
    assert read_manifest(tmp_path / "best").progress.best == (6, 0.5)


def test_after_damage_the_best_is_that_of_the_checkpoint_taken(tmp_path: Path, scripted: Any) -> None:
    scripted({2: 0.3, 4: 0.1, 6: 0.9})
    train(tmp_path, steps=6, keep=3)
    (tmp_path / "step-00000006" / "part-0.safetensors").write_bytes(b"")
    scripted({2: 0.2, 4: 0.1})  # of steps 6 and 8: step 6 goes another way now
    train(tmp_path, resume=tmp_path)
    assert names(tmp_path) == ["best", "step-00000002", "step-00000008"]
    assert os.readlink(tmp_path / "best") == "step-00000002"


def test_without_links_on_the_file_system_the_best_is_kept_all_the_same(
    tmp_path: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    scripted({2: 0.9})
    recorder = train(tmp_path)
    assert recorder.problems == []
    assert names(tmp_path) == ["step-00000002", "step-00000008"]
    assert read_manifest(newest(tmp_path)).progress.best == (2, 0.9)


@pytest.mark.parametrize("save_local", [False, True])
def test_all_workers_save_the_best_step_of_the_client(pool: Pool, tmp_path: Path, save_local: bool) -> None:
    running = RunOptions(save=tmp_path, save_every=5, evaluate_every=1, keep=1, save_local=save_local)
    end = pool.run(train_toy, 3, "plain", running, {"compress": "none"})[0].end
    best = read_manifest(tmp_path / "best")
    assert len(best.parts) == 3
    assert best.progress.step == end.best_step
    assert best.progress.metric == end.best_metric
    assert len(checkpoints(tmp_path)) <= 2


def test_a_manifest_of_an_earlier_version_has_no_best(tmp_path: Path, scripted: Any) -> None:
    scripted({2: 0.9})
    train(tmp_path, steps=2)
    facts = read_facts(newest(tmp_path))
    del facts["progress"]["best"], facts["habits"]["keep_best"]
    manifest = manifest_of(facts, tmp_path)
    assert (manifest.progress.best, manifest.options.keep_best) == (None, False)


def test_only_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to("../elsewhere")
    assert follow_best(tmp_path / "best") == tmp_path / "best"
    assert follow_best(tmp_path / "absent" / "best") == tmp_path / "absent" / "best"
    assert follow_best(tmp_path) == tmp_path
