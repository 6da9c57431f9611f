"""--compress auto in training: all workers switch together, and a resumed run continues bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.train.toy import ToyTask, settings_for, world_in
from thinpipe.lab.runs.summary import RecordFile
from thinpipe.options import OptionError
from thinpipe.train.checkpoints.folder import newest_manifest
from thinpipe.train.engines.auto_bits import AutoBits
from thinpipe.train.evaluation import evaluate_on_worker
from thinpipe.train.resolve import resolve, resolve_evaluation, resolve_for_resume
from thinpipe.train.running import RunOptions
from thinpipe.train.worker import train

EPOCHS = 17  # of 4 steps: the basis of rows of 256 values is learned from step 57 on, and in use four steps later
CHOSEN = {3: [4, 8, 8, 4], 58: [2, 2, 2, 2], 62: [3, 2, 8, 4], 65: [2, 3, 2, 2]}  # after these steps


def choose(self: AutoBits) -> list[int]:
    return CHOSEN.get(self._step, self.levels)


def train_chosen(group: Any, running: RunOptions, record: Path, given: dict[str, Any]) -> None:
    """Train with decisions that do not depend on measured times."""
    task = ToyTask()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoBits, "next_levels", choose)
        settings = settings_for(task, group, epochs=EPOCHS, **given)
        facts = {"forward": settings.compress_forward, "backward": settings.compress_backward, "seed": 0}
        train(task, settings, running, world_in(group), lambda: RecordFile(record, config={}, **facts))


def row_of(record: Path) -> dict[str, Any]:
    (row,) = json.loads(record.read_text())["rows"]
    return dict(row)


def test_a_resumed_run_ends_with_the_same_parameters(pool: Pool, tmp_path: Path) -> None:
    given = {"compress": "auto:2-8"}
    whole, first, second = (tmp_path / f"{name}.json" for name in ("whole", "first", "second"))
    pool.run(train_chosen, 2, RunOptions(), whole, given)
    folder = tmp_path / "run"
    pool.run(train_chosen, 2, RunOptions(save=folder, steps=63), first, given)
    assert newest_manifest(folder)[1].progress.levels == (3, 2, 8, 4)
    pool.run(train_chosen, 2, RunOptions(save=folder, resume=folder), second, given)
    assert row_of(second)["parameters_sha256"] == row_of(whole)["parameters_sha256"]
    names = ("0 to 1", "1 to 2", "1 to 0", "2 to 1")
    changes = {1: [8, 8, 8, 8]} | {step + 1: bits for step, bits in CHOSEN.items()}
    assert row_of(whole)["bits"] == [
        {"step": step, "bits": dict(zip(names, bits, strict=True))} for step, bits in changes.items()
    ]
    assert [(each["step"], list(each["bits"].values())) for each in row_of(second)["bits"]] == [
        (64, CHOSEN[62]),
        (66, CHOSEN[65]),
    ]


def test_fewer_bits_send_fewer_bytes_and_other_values(pool: Pool, tmp_path: Path) -> None:
    rows = []
    for spec in ("auto:2-8", "8bit"):
        record = tmp_path / f"{spec[:1]}.json"
        pool.run(train_chosen, 2, RunOptions(), record, {"compress": spec})
        rows.append(row_of(record))
    assert rows[0]["wire_bytes_per_step"] < 0.8 * rows[1]["wire_bytes_per_step"]
    assert rows[0]["parameters_sha256"] != rows[1]["parameters_sha256"]
    assert rows[0]["validation_loss"] < 0.1
    assert rows[1]["bits"] == []


def evaluated(group: Any, run: Path) -> tuple[float, int]:
    task = ToyTask()
    settings = settings_for(task, group, epochs=EPOCHS, compress="auto:2-8")
    found = evaluate_on_worker(world_in(group), settings, run, None, "validation", task)
    return found.found.loss, found.wire_bytes


def test_an_evaluation_uses_the_saved_level(pool: Pool, tmp_path: Path) -> None:
    folder, record = tmp_path / "run", tmp_path / "record.json"
    pool.run(train_chosen, 2, RunOptions(save=folder), record, {"compress": "auto:2-8"})
    loss, sent = pool.run(evaluated, 2, folder)[0]
    assert loss == row_of(record)["validation_loss"]
    pool.run(train_chosen, 2, RunOptions(save=tmp_path / "most", steps=2), record, {"compress": "auto:2-8"})
    assert sent < 0.6 * pool.run(evaluated, 2, tmp_path / "most")[0][1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parallel": "data", "compress": "auto"}, "adapts the links of a pipeline"),
        ({"parallel": "none", "compress": "auto:2-8"}, "adapts the links of a pipeline"),
        ({"compress": "auto:2-9"}, "auto takes the fewest and the most bits"),
        ({"compress": "4bit", "auto_every": 20}, "auto_every is for compress auto"),
        ({"compress": "auto", "auto_every": 2}, "auto_every is from 8"),
    ],
)
def test_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(given, ToyTask.defaults, device="cpu")


def test_nothing_is_measured_in_one_process() -> None:
    settings = resolve({"compress": "auto"}, ToyTask.defaults, device="cpu")
    assert (settings.compress_forward, settings.compress_backward) == ("auto:2-8", "auto:2-8+gradients")
    with pytest.raises(OptionError, match="measures links"):
        RunOptions(in_process=True).check_with(settings)
    assert resolve_for_resume({"compress": "auto", "auto_every": 40}, settings).auto_every == 40


def test_an_evaluation_of_another_run_is_rejected() -> None:
    with pytest.raises(OptionError, match="a codec that learns nothing"):
        resolve_evaluation(None, {"compress": "auto:4-8"})
