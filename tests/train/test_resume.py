"""A run that is taken up again ends where the unbroken one does, bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.train.toy import Recorder, ToyTask, run_toy, saved_model, train_toy
from thinpipe.train.checkpoints.folder import checkpoints, load, newest
from thinpipe.train.checkpoints.manifest import read_manifest
from thinpipe.train.resolve import resolve_for_resume
from thinpipe.train.running import RunOptions
from thinpipe.train.shaping import parse_link


def train(pool: Pool, workers: int, kind: str, running: RunOptions, given: dict[str, Any]) -> Recorder:
    if workers == 1:
        return run_toy(None, ToyTask(kind), running, **given)
    return pool.run(train_toy, workers, kind, running, given)[0]


REPLICAS = {"parallel": "data"}


@pytest.mark.parametrize(
    ("workers", "kind", "given", "steps"),
    [
        pytest.param(2, "batchnorm", {"compress": "sort:8"}, [2, 4, 5], id="stateless codec, batch norm"),
        pytest.param(2, "dropout", {"compress": "power:4"}, [2, 5], id="warm-started codec, dropout"),
        pytest.param(2, "batchnorm", {"compress": "tile:4+sr"}, [4, 5], id="stochastic rounding"),
        pytest.param(
            2, "dropout", {"compress_forward": "axes:2+now", "epochs": 3}, [2, 5, 9], id="learned axes, dropout"
        ),
        pytest.param(3, "dropout", {"layout": "linear", "optimizer": "adamw"}, [4, 5], id="a line, adamw"),
        pytest.param(2, "dropout", REPLICAS, [2, 4], id="two replicas"),
        pytest.param(3, "dropout", REPLICAS | {"compress": "uniform:4"}, [2, 5], id="three replicas, error feedback"),
        pytest.param(2, "batchnorm", REPLICAS | {"compress": "power:2"}, [4, 5], id="replicas, warm-started"),
        pytest.param(2, "plain", REPLICAS | {"compress": "tile:2+sr"}, [2, 5], id="replicas, stochastic rounding"),
        pytest.param(1, "dropout", {"parallel": "none", "chunks": 2}, [2, 4, 5], id="one process"),
    ],
)
def test_from_any_checkpoint_the_end_is_the_same(
    pool: Pool, tmp_path: Path, workers: int, kind: str, given: dict[str, Any], steps: list[int]
) -> None:
    """Steps to stop at, of four per epoch: within the first epoch (2), at its end (4), within the second (5)."""
    whole = train(pool, workers, kind, RunOptions(save=tmp_path / "whole", save_every=1, keep=12), given)
    assert whole.end is not None
    for step in steps:
        path = tmp_path / "whole" / f"step-{step:08d}"
        rest = train(pool, workers, kind, RunOptions(save=tmp_path / f"from-{step}", resume=path), given)
        assert rest.end is not None
        assert rest.end.parameters_sha256 == whole.end.parameters_sha256
        assert rest.end.steps == len(whole.steps) - step
        assert [s.loss for s in rest.steps] == [s.loss for s in whole.steps[step:]]
        assert rest.epochs[-1].train_loss == whole.epochs[-1].train_loss
        assert rest.epochs[-1].validation_loss == whole.epochs[-1].validation_loss
        assert rest.end.best_metric == whole.end.best_metric


def test_over_other_links_as_many_chunks_are_in_flight(pool: Pool, tmp_path: Path) -> None:
    """The random numbers of a client with both ends depend on the layout."""
    given = {"schedule": "1f1b", "chunks": 9, "client_layers": (1, 2)}
    saving = RunOptions(save=tmp_path, save_every=1, keep=9, link=parse_link("10mbit,25ms"))
    whole = pool.run(train_toy, 2, "dropout", saving, given)[0]
    assert whole.plan.schedule == "1f1b:9"
    saved = read_manifest(tmp_path / "step-00000005").settings
    again = resolve_for_resume(given, saved)
    assert again.schedule == saved.schedule == "1f1b:9"
    rest = RunOptions(resume=tmp_path / "step-00000005")
    ended = pool.run(train_toy, 2, "dropout", rest, given | {"schedule": again.schedule})[0].end
    assert ended.parameters_sha256 == whole.end.parameters_sha256
    without = pool.run(train_toy, 2, "dropout", RunOptions(), given)[0]
    assert without.plan.schedule == "1f1b"
    assert without.end.parameters_sha256 != whole.end.parameters_sha256


@pytest.mark.parametrize("spec", ["power:4", "tile:4+sr", "axes:2+now"])
def test_links_that_forget_end_elsewhere(pool: Pool, tmp_path: Path, spec: str) -> None:
    """The test above depends on link state and does not pass by chance."""
    given = {"compress_forward": spec, "epochs": 3}
    whole = pool.run(train_toy, 2, "plain", RunOptions(save=tmp_path, save_every=5, keep=9), given)[0]
    forgetful = pool.run(_train_forgetting, 2, RunOptions(resume=tmp_path / "step-00000005"), given)[0]
    assert forgetful.end.parameters_sha256 != whole.end.parameters_sha256


def _train_forgetting(group: Any, running: RunOptions, given: dict[str, Any]) -> Recorder:
    from thinpipe.train.engines.pipeline import PipelineEngine

    remember, PipelineEngine.load_codec_state = PipelineEngine.load_codec_state, lambda self, memory: None  # type: ignore[method-assign]
    try:
        return train_toy(group, "plain", running, given)
    finally:
        PipelineEngine.load_codec_state = remember  # type: ignore[method-assign]


@pytest.mark.parametrize("spec", ["power:4", "tile:4+sr", "axes:2+now"])
def test_evaluation_changes_nothing(pool: Pool, tmp_path: Path, spec: str) -> None:
    """Stopping in the middle of an epoch evaluates once more than an unbroken run; the end is the same."""
    given = {"compress_forward": spec}
    whole = pool.run(train_toy, 2, "batchnorm", RunOptions(), given)[0]
    pool.run(train_toy, 2, "batchnorm", RunOptions(save=tmp_path, steps=3), given)
    rest = pool.run(train_toy, 2, "batchnorm", RunOptions(resume=newest(tmp_path)), given)[0]
    assert rest.end.parameters_sha256 == whole.end.parameters_sha256


@pytest.mark.parametrize(
    ("before", "after", "given", "moved"),
    [
        pytest.param(3, 2, {}, {}, id="fewer workers"),
        pytest.param(2, 4, {"optimizer": "adamw"}, {}, id="more workers"),
        pytest.param(2, 2, {}, {"client_layers": (2, 1)}, id="other client layers"),
        pytest.param(3, 2, {}, {"layout": "linear"}, id="a line"),
        pytest.param(2, 3, {"layout": "linear"}, {"layout": "client-server"}, id="a client"),
        pytest.param(3, 2, {"parallel": "data", "optimizer": "adamw"}, {}, id="fewer replicas"),
    ],
)
def test_any_number_of_workers_resumes(
    pool: Pool, tmp_path: Path, before: int, after: int, given: dict[str, Any], moved: dict[str, Any]
) -> None:
    """No codec loses anything and nothing is drawn at random: the end is the unbroken run's, but for rounding."""
    given = {"compress": "none", "lr": 1e-3} | given
    saving = RunOptions(save=tmp_path / "whole", save_every=5)
    whole = pool.run(train_toy, before, "plain", saving, given)[0]
    going_on = RunOptions(save=tmp_path / "cut", resume=tmp_path / "whole" / "step-00000005")
    rest = pool.run(train_toy, after, "plain", going_on, given | moved)[0]
    assert rest.end.steps == 3
    assert [step.loss for step in rest.steps] == pytest.approx([step.loss for step in whole.steps[5:]], rel=1e-5)
    expected, found = saved_model(tmp_path / "whole"), saved_model(tmp_path / "cut")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
    (line,) = rest.notices
    assert line.endswith("dropped: " + ("the random state of worker 2" if before == 3 else "nothing"))


def test_links_between_the_same_units_keep_state_and_others_are_reported(pool: Pool, tmp_path: Path) -> None:
    """Three workers are cut before units 1, 3 and 5, two before 1 and 5."""
    given = {"compress": "power:4"}
    pool.run(train_toy, 3, "dropout", RunOptions(save=tmp_path, steps=5), given)
    assert read_manifest(newest(tmp_path)).first_units == (0, 1, 3, 5)
    before = load(newest(tmp_path), lambda name: name.startswith("link/"))
    seen = pool.run(_recalled, 2, RunOptions(resume=tmp_path, steps=6), given)[0]
    assert seen.notices == [
        "saved with 3 workers, goes on with 2: results will not be bit-identical; dropped: what codecs "
        "remembered of the link before unit 3, the random state of worker 2"
    ]
    # Of two workers, the client has stages 0 and 2: what was stage 3, behind unit 5, is 2 now.
    was = {name: name.replace("link/2/", "link/3/") for name in seen.recalled}
    assert {name.split("/")[1] for name in was} == {"0", "2"}
    assert any(not name.endswith("/steps") for name in was)
    for now, then in was.items():
        assert torch.equal(seen.recalled[now], before[then]), now


def _recalled(group: Any, running: RunOptions, given: dict[str, Any]) -> Recorder:
    """Return the tensors given to the client's links, in addition to its result."""
    from thinpipe.train.engines.pipeline import PipelineEngine

    recall, seen = PipelineEngine.load_codec_state, {}

    def listen(self: PipelineEngine, memory: dict[str, torch.Tensor]) -> None:
        seen.update(memory)
        recall(self, memory)

    PipelineEngine.load_codec_state = listen  # type: ignore[method-assign]
    try:
        recorder = train_toy(group, "dropout", running, given)
    finally:
        PipelineEngine.load_codec_state = recall  # type: ignore[method-assign]
    recorder.recalled = seen  # type: ignore[attr-defined]
    return recorder


def test_fewer_replicas_drop_error_feedback(pool: Pool, tmp_path: Path) -> None:
    given = {"parallel": "data", "compress": "uniform:4"}
    pool.run(train_toy, 3, "dropout", RunOptions(save=tmp_path, steps=5), given)
    rest = pool.run(train_toy, 2, "dropout", RunOptions(resume=tmp_path), given)[0]
    assert rest.end.steps == 3
    assert rest.notices[0].endswith("dropped: what replicas had not sent yet, the random state of worker 2")


def test_only_the_newest_are_kept_and_the_last_is_complete(tmp_path: Path) -> None:
    running = RunOptions(save=tmp_path, save_every=3, keep=2, keep_best=False)
    recorder = run_toy(None, ToyTask(), running, parallel="none")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000006", "step-00000008"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]
    assert [Path(path).name for path in recorder.paths] == ["step-00000003", "step-00000006", "step-00000008"]
    progress = read_manifest(newest(tmp_path)).progress
    assert progress.is_complete
    assert recorder.end is not None
    assert progress.parameters_sha256 == recorder.end.parameters_sha256
    assert (progress.metric, progress.best_metric) == (recorder.end.metric, recorder.end.best_metric)


def test_an_older_checkpoint_never_replaces_newer_ones(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_toy(None, ToyTask(), RunOptions(save=first, save_every=2, keep=9), parallel="none")
    names = ["step-00000002", "step-00000004", "step-00000006", "step-00000008"]
    older = RunOptions(save=first, save_every=1, resume=first / names[1], steps=5)
    with pytest.raises(ValueError, match="newer checkpoints, which the run would replace: step-00000006, step-"):
        run_toy(None, ToyTask(), older, parallel="none")
    assert [path.name for path in checkpoints(first)] == names
    run_toy(None, ToyTask(), replace(older, save=second), parallel="none")
    assert [path.name for path in checkpoints(second)] == ["step-00000005"]
    assert [path.name for path in checkpoints(first)] == names
    with pytest.raises(ValueError, match="holds checkpoints of another run"):
        run_toy(None, ToyTask(), replace(older, save=second), parallel="none")


def test_after_a_damaged_one_the_later_ones_are_made_again(tmp_path: Path) -> None:
    run_toy(None, ToyTask(), RunOptions(save=tmp_path, save_every=1, keep=2), parallel="none")
    newest(tmp_path).joinpath("part-0.safetensors").write_bytes(b"")
    recorder = run_toy(None, ToyTask(), RunOptions(save=tmp_path, save_every=1, resume=tmp_path), parallel="none")
    assert recorder.notices[0].startswith("step 8 is damaged")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000007", "step-00000008"]
    assert newest(tmp_path).joinpath("part-0.safetensors").stat().st_size


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    run_toy(None, ToyTask(), RunOptions(save=tmp_path, save_every=3, keep=9, keep_best=False), parallel="none")
    (tmp_path / "step-00000008").rename(tmp_path / "step-00000008.partial")  # ended before the last rename
    (tmp_path / "step-00000006" / "manifest.json").unlink()  # a folder that somebody copied in part
    assert newest(tmp_path).name == "step-00000003"
    shutil.rmtree(tmp_path / "step-00000003")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        newest(tmp_path)


def test_leftovers_of_an_interrupted_run_do_not_disturb_the_next(tmp_path: Path) -> None:
    left = tmp_path / "step-00000004.partial"
    left.mkdir()
    (left / "manifest.json").write_text("{")
    run_toy(None, ToyTask(), RunOptions(save=tmp_path), parallel="none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-00000004", "step-00000008"]
