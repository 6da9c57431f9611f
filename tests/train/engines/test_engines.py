"""Pipelines and replicas train what a single process trains; evaluation counts every sample once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.pool import Pool
from tests.train.toy import (
    CLASSES,
    FEATURES,
    VALIDATION,
    ToySplit,
    ToyTask,
    run_toy,
    saved_model,
    train_toy,
    world_in,
)
from thinpipe.codecs.buckets import Buckets
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.replica import ReplicaEngine
from thinpipe.train.engines.units import Meta
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.task import Shape, Source

STEPS = 5  # of the eight there are: one more than an epoch


def both(pool: Pool, tmp_path: Path, kind: str, workers: int, given: dict[str, Any], alone: dict[str, Any]) -> Any:
    """The models and what the clients heard: of several workers, and of one process."""
    recorder = pool.run(train_toy, workers, kind, RunOptions(save=tmp_path / "many", steps=STEPS), given)[0]
    single = run_toy(None, ToyTask(kind), RunOptions(save=tmp_path / "one", steps=STEPS), parallel="none", **alone)
    return saved_model(tmp_path / "many"), saved_model(tmp_path / "one"), recorder, single


# No AdamW with batch norm: a bias before one has no gradient but rounding, which Adam makes as large as any other.
ADAMW = {"optimizer": "adamw", "weight_decay": 0.1, "clip_norm": 0.1, "lr": 0.001}


@pytest.mark.parametrize(
    ("kind", "workers", "given"),
    [
        pytest.param("plain", 2, {}, id="client and server"),
        pytest.param("batchnorm", 2, {}, id="batch norm"),
        pytest.param("batchnorm", 3, {"schedule": "1f1b", "recompute": True}, id="two servers, 1f1b, recompute"),
        pytest.param("plain", 3, {"layout": "linear"}, id="a line of three"),
        pytest.param("plain", 2, ADAMW, id="adamw, clipped"),
    ],
)
def test_an_uncompressed_pipeline_trains_like_one_process(
    pool: Pool, tmp_path: Path, kind: str, workers: int, given: dict[str, Any]
) -> None:
    training = {
        name: value for name, value in given.items() if name in ("optimizer", "weight_decay", "clip_norm", "lr")
    }
    many, one, recorder, single = both(
        pool, tmp_path, kind, workers, {"compress": "none", **given}, {"chunks": 3, **training}
    )
    assert many.keys() == one.keys()
    for name, value in many.items():
        torch.testing.assert_close(value, one[name], atol=1e-5, rtol=1e-5)
    assert [step.loss for step in recorder.steps] == pytest.approx([step.loss for step in single.steps], abs=1e-5)
    assert [step.accuracy for step in recorder.steps] == [step.accuracy for step in single.steps]
    norms = [step.gradient_norm for step in recorder.steps]
    assert norms == (
        [None] * STEPS if "clip_norm" not in given else pytest.approx([s.gradient_norm for s in single.steps])
    )


def test_replicas_train_like_one_process(pool: Pool, tmp_path: Path) -> None:
    many, one, recorder, single = both(pool, tmp_path, "plain", 2, {"parallel": "data"}, {})
    for name, value in many.items():
        torch.testing.assert_close(value, one[name], atol=1e-5, rtol=1e-5)
    assert recorder.end.metric == single.end.metric
    assert recorder.end.validation_loss == pytest.approx(single.end.validation_loss, abs=1e-5)
    assert recorder.steps[0].wire_bytes > 0


def test_compressed_gradients_train_as_well_for_a_quarter_of_the_bytes(pool: Pool) -> None:
    def trained(**given: Any) -> Any:
        return pool.run(train_toy, 2, "plain", RunOptions(), {"parallel": "data", "epochs": 4, **given})[0]

    plain, small = trained(), trained(compress="uniform:8")
    assert small.end.metric >= plain.end.metric > 0.9
    assert small.end.parameters_sha256 != plain.end.parameters_sha256, "nothing was lost: was it compressed?"
    # Two replicas: the ring sends every gradient once, and so does the hook.
    assert small.steps[0].wire_bytes == pytest.approx(plain.steps[0].wire_bytes / 4, rel=0.02)
    rough, forgetful = trained(compress="uniform:2"), trained(compress="uniform:2", error_feedback=False)
    assert rough.end.parameters_sha256 != forgetful.end.parameters_sha256
    assert rough.steps[0].loss == forgetful.steps[0].loss  # before anything was lost


@pytest.mark.parametrize(
    ("workers", "given"),
    [
        pytest.param(1, {"parallel": "none", "batch_size": 7}, id="one process"),
        pytest.param(1, {"parallel": "none", "batch_size": 46, "chunks": 2}, id="a batch larger than all samples"),
        pytest.param(2, {"batch_size": 9, "chunks": 3}, id="client and server"),
        pytest.param(3, {"layout": "linear", "batch_size": 6, "chunks": 1}, id="a line of three"),
        pytest.param(2, {"parallel": "data", "batch_size": 14}, id="replicas"),
    ],
)
def test_evaluation_counts_every_sample_once(pool: Pool, tmp_path: Path, workers: int, given: dict[str, Any]) -> None:
    running = RunOptions(save=tmp_path, steps=1)
    given = {"compress": "none", **given}
    recorder = (
        run_toy(None, ToyTask(), running, **given)
        if workers == 1
        else pool.run(train_toy, workers, "plain", running, given)[0]
    )
    model = ToyTask().build(Shape(classes=5), Source())
    model.load_state_dict({name.removeprefix("model/"): value for name, value in saved_model(tmp_path).items()})
    reference = ToySplit(VALIDATION, 3)
    logits = model(reference.points).detach()
    assert recorder.end.metric == pytest.approx(float((logits.argmax(1) == reference.labels).float().mean()))
    assert recorder.end.validation_loss == pytest.approx(
        float(functional.cross_entropy(logits, reference.labels)), abs=1e-5
    )


def test_compressed_links_carry_fewer_bytes_and_end_elsewhere(pool: Pool) -> None:
    ends = {
        spec: pool.run(train_toy, 2, "plain", RunOptions(), {"compress": spec})[0] for spec in ("none", "uniform:8")
    }
    plain, small = ends["none"].end, ends["uniform:8"].end
    assert plain.parameters_sha256 != small.parameters_sha256
    assert sum(link.wire_bytes for link in small.links) < 0.3 * sum(link.wire_bytes for link in plain.links)
    assert all(link.encode_ms > 0 and link.decode_ms > 0 for link in small.links)


def test_traffic_is_as_planned(pool: Pool) -> None:
    codecs = {"compress_forward": "sort:8", "compress_backward": "none"}
    recorder = pool.run(train_toy, 3, "plain", RunOptions(), codecs)[0]
    steps = len(recorder.steps)
    planned = {
        (link.source, link.target): (steps * link.tensor_bytes, steps * link.wire_bytes) for link in recorder.plan.links
    }
    used = {(link.source, link.target): (link.tensor_bytes, link.wire_bytes) for link in recorder.end.links}
    assert planned == used
    assert {step.wire_bytes for step in recorder.steps} == {sum(link.wire_bytes for link in recorder.plan.links)}
    assert [holding.worker for holding in recorder.plan.holdings] == [0, 1, 2, 0]
    assert sum(holding.units for holding in recorder.plan.holdings) == 6
    assert sum(holding.parameters for holding in recorder.plan.holdings) == recorder.plan.parameters
    assert [worker.stages for worker in recorder.end.workers] == [(0, 3), (1,), (2,)]
    assert all(worker.compute_ms > 0 and worker.peak_mib > 0 for worker in recorder.end.workers)


@pytest.mark.parametrize("given", [{"parallel": "none"}, {"parallel": "data"}, {}], ids=["none", "data", "pipeline"])
def test_autocast_trains_near_full_precision_and_sends_half(pool: Pool, given: dict[str, Any]) -> None:
    def trained(**more: Any) -> Any:
        settings = {**given, "compress": "none", **more}
        if given.get("parallel") == "none":
            return run_toy(None, ToyTask(), **settings)
        return pool.run(train_toy, 2, "plain", RunOptions(), settings)[0]

    full, half = trained(), trained(amp=True)
    assert half.end.parameters_sha256 != full.end.parameters_sha256
    assert half.end.validation_loss == pytest.approx(full.end.validation_loss, abs=0.02)
    for a, b in zip(full.plan.links, half.plan.links, strict=True):
        checksums = 8 * 3  # of as many messages
        assert (b.wire_bytes - checksums) * 2 == a.wire_bytes - checksums


def test_all_parallelisms_start_from_the_same_weights_and_order(pool: Pool) -> None:
    """The loss of the first batch is that of the weights that the seed drew."""
    first = [
        run_toy(None, ToyTask(), RunOptions(steps=1), parallel="none").steps[0].loss,
        pool.run(train_toy, 2, "plain", RunOptions(steps=1), {"compress": "none"})[0].steps[0].loss,
        pool.run(train_toy, 2, "plain", RunOptions(steps=1), {"parallel": "data"})[0].steps[0].loss,
    ]
    assert first == pytest.approx([first[0]] * 3, abs=1e-6)
    assert run_toy(None, ToyTask(), RunOptions(steps=1), parallel="none", seed=1).steps[0].loss != first[0]


def what_was_warmed(group: Any, given: dict[str, Any]) -> tuple[list[Any], int, bool]:
    """Return the shapes that warmed up a worker's codecs, and counters and random state before the first step."""
    model = ToyTask().build(Shape(classes=CLASSES), Source())
    engine: Any
    if "forward" in given:
        chunk = (Meta((6, FEATURES), torch.float32),)
        cutting = Cutting(layout="client-server", order="gpipe", chunks=3)
        engine = PipelineEngine(model, chunk, cutting, Links(**given), world_in(group))
    else:
        engine = ReplicaEngine(model, world_in(group), **given)
    met = []
    encode = Buckets.encode

    def note(codec: Buckets, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        met.append((codec.spec, tuple(x.shape)))
        return encode(codec, x, *args, **kwargs)

    random = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buckets, "encode", note)
        engine.warm_up()
    return sorted(met), engine.sent_bytes(), torch.equal(random, torch.get_rng_state())


def test_codecs_are_warm_before_the_first_step_and_nothing_is_counted(pool: Pool) -> None:
    chunk = (6, FEATURES)
    given = {"forward": "uniform:8", "backward": "uniform:4"}
    both_directions = [("uniform:4", chunk), ("uniform:8", chunk)]
    assert pool.run(what_was_warmed, 2, given) == [(both_directions, 0, True)] * 2
    replicas = pool.run(what_was_warmed, 2, {"compress": "uniform:8"})
    assert replicas == [([("uniform:8", (FEATURES, FEATURES))], 0, True)] * 2


def test_evaluations_within_an_epoch_change_nothing_else(pool: Pool) -> None:
    """Four steps make an epoch; what codecs remember must not notice."""
    often, seldom = (
        pool.run(train_toy, 2, "plain", RunOptions(steps=6, evaluate_every=every), {"compress": "power:1"})[0]
        for every in (3, None)
    )
    assert [epoch.step for epoch in often.epochs] == [3, 4, 6]
    assert [epoch.step for epoch in seldom.epochs] == [4, 6]
    assert often.end.parameters_sha256 == seldom.end.parameters_sha256
