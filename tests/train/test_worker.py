"""Impossible runs are the same error on all workers, before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.pool import Pool
from tests.train.toy import Recorder, ToyTask, settings_for, world_in
from thinpipe.train.engines.world import SetupError
from thinpipe.train.preflight import check_space
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.task import Data, Shape, Source
from thinpipe.train.worker import train


class Missing(ToyTask):
    """Data that is not there: only those who read it find out."""

    def load(self, source: Source) -> tuple[Data, Shape]:
        raise ValueError("put it here")


def too_full(paths: object, sizes: Mapping[str, int]) -> None:
    raise ValueError(f"no room for {sizes['save']} bytes")


def setup_error(group: Any, case: str, save: Path, given: dict[str, Any]) -> str:
    task = Missing() if case == "data" else ToyTask()
    if case == "disagree" and group.rank() == 1:
        given = given | {"lr": 0.5}
    check = too_full if case == "disk" else check_space
    running = RunOptions(save=save, keep=1)
    try:
        with patch("thinpipe.train.worker.check_space", check):
            train(task, settings_for(task, group, **given), running, world_in(group), Recorder)
    except SetupError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("case", "given", "message"),
    [
        ("data", {}, "put it here"),
        ("data", {"parallel": "data"}, "put it here"),
        ("small", {"batch_size": 81}, "batch_size 81 is more than the 80 samples"),
        ("cuts", {"client_layers": (3, 3)}, "leave every server a unit"),
        ("disagree", {}, "lr: 0.05 on workers 0, 2; 0.5 on worker 1"),
    ],
)
def test_all_workers_raise_the_same(pool: Pool, tmp_path: Path, case: str, given: dict[str, Any], message: str) -> None:
    errors = pool.run(setup_error, 3, case, tmp_path, given)
    assert len(set(errors)) == 1
    assert message in errors[0]


def test_space_is_required_for_three_checkpoints_to_keep_one_and_the_best(pool: Pool, tmp_path: Path) -> None:
    """Parameters and SGD's momentum, and no buffers; a new one is complete before an old one goes."""
    parameters = 5 * (256 * 256 + 256) + 256 * 5 + 5
    errors = pool.run(setup_error, 2, "disk", tmp_path, {})
    assert errors == [f"no room for {3 * 2 * 4 * parameters} bytes"] * 2
    assert list(tmp_path.iterdir()) == []
