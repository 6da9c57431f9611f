"""A pipeline's stages in one process end where those of several workers do, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.train.toy import ToyTask, run_toy, settings_for
from thinpipe.options import OptionError
from thinpipe.train.running import RunOptions


def outcome(group: Any, running: RunOptions, given: dict[str, Any]) -> Any:
    """Return the result on the client."""
    end = run_toy(group, ToyTask("batchnorm"), running, **given).end
    return None if end is None else (end.parameters_sha256, end.train_loss, end.validation_loss)


@pytest.mark.parametrize(
    "given",
    [
        {"compress_forward": "tile:4+sr", "compress_backward": "tile:4+zero", "layout": "linear"},
        {"compress_forward": "topk:0.2", "compress_backward": "none", "schedule": "1f1b"},
        {"compress_forward": "power:2", "compress_backward": "kmeans:2", "accumulate": 2},
        {"compress_forward": "axes:2+now", "compress_backward": "tile:4+zero", "epochs": 3},
    ],
    ids=lambda given: given["compress_forward"],
)
def test_it_ends_with_the_parameters_of_several_workers(pool: Pool, given: dict[str, Any]) -> None:
    (client, *_) = pool.run(outcome, 3, RunOptions(), given)
    (alone,) = pool.run(outcome, 1, RunOptions(in_process=True), given | {"workers": 3})
    assert alone == client


def test_a_run_resumes_with_separate_workers(pool: Pool, tmp_path: Path) -> None:
    given = {"compress_forward": "power:2", "workers": 3}
    (whole,) = pool.run(outcome, 1, RunOptions(in_process=True), given)
    pool.run(outcome, 1, RunOptions(in_process=True, save=tmp_path, steps=3), given)
    client, *_ = pool.run(outcome, 3, RunOptions(resume=tmp_path), given)
    assert client == whole


@pytest.mark.parametrize(
    ("given", "running", "message"),
    [
        ({"parallel": "none"}, {}, "in_process does not go together with parallel none"),
        ({"workers": 2}, {"trace": Path("step.png")}, "in_process does not go together with trace"),
    ],
    ids=["none", "trace"],
)
def test_options_it_excludes(given: dict[str, Any], running: dict[str, Any], message: str) -> None:
    settings = settings_for(ToyTask(), None, **{"workers": 1} | given)
    with pytest.raises(OptionError, match=message):
        RunOptions(in_process=True, **running).check_with(settings)
