"""Batches whose gradients add up before an update are one batch as large as all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.train.engines.test_language_models import CHUNKS, SAMPLES, batches, build
from tests.train.toy import ToyTask, run_toy, train_toy, world_in
from thinpipe.train.batches import epoch_order
from thinpipe.train.engines.finite import NotFiniteError
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.replica import ReplicaEngine
from thinpipe.train.engines.units import cut_model, meta_of
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.task import Batch

TWICE = {"accumulate": 2, "batch_size": 18}


@pytest.mark.parametrize(
    ("workers", "given", "once"),
    [
        pytest.param(1, {"parallel": "none", "chunks": 3}, {"chunks": 6}, id="one process"),
        pytest.param(2, {"compress": "none"}, {"chunks": 6}, id="pipeline"),
        pytest.param(2, {"compress": "none", "schedule": "1f1b", "layout": "linear"}, {"chunks": 6}, id="a line"),
        pytest.param(2, {"parallel": "data"}, {"chunks": 2}, id="replicas"),
    ],
)
def test_two_batches_are_one_of_twice_the_size(
    pool: Pool, workers: int, given: dict[str, Any], once: dict[str, Any]
) -> None:
    def trained(options: dict[str, Any]) -> Any:
        if workers == 1:
            return run_toy(None, ToyTask(), RunOptions(), **options)
        return pool.run(train_toy, workers, "plain", RunOptions(), options)[0]

    many, one = trained(given | TWICE), trained(given | {"batch_size": 36} | once)
    assert [step.samples for step in many.steps] == [36] * 4  # two of each epoch of 80
    for name in ("lr", "loss", "accuracy"):
        received = [[getattr(step, name) for step in recorder.steps] for recorder in (many, one)]
        assert received[0] == pytest.approx(received[1], abs=1e-5)
    if given.get("parallel") == "data":  # whose replicas have other samples, and send once in a step
        assert [step.wire_bytes for step in many.steps] == [step.wire_bytes for step in one.steps]
    else:
        assert many.end.parameters_sha256 == one.end.parameters_sha256


def joined(pair: list[Batch]) -> Batch:
    inputs = zip(*(batch.inputs for batch in pair), strict=True)
    return Batch(inputs=tuple(map(torch.cat, inputs)), labels=torch.cat([batch.labels for batch in pair]))


def gradients(group: dist.ProcessGroup | None, once: bool) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return two batches of texts, the second with far fewer labels."""
    pair = batches(padded=True)[:2]
    pair[1].labels[:, 3:] = -100
    given, chunks = ([joined(pair)], 2 * CHUNKS) if once else (pair, CHUNKS)
    world = world_in(group)
    chunk = meta_of([each[: SAMPLES // CHUNKS] for each in pair[0].inputs])
    if group is None:
        engine: Any = ReplicaEngine(cut_model(build("llama"), chunk), world, chunks=chunks)
    else:
        cutting = Cutting(layout="client-server", order="gpipe", chunks=chunks)
        engine = PipelineEngine(build("llama"), chunk, cutting, Links(forward="none", backward="none"), world)
    loss, correct = engine.compute(*(given if engine.reads_labels else [None] * len(given)))
    named = {name: each for stage in engine.stages.values() for name, each in stage.parameters().items()}
    return loss, correct, {name: each.grad for name, each in named.items()}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_mean_is_over_all_labelled_positions(pool: Pool, workers: int) -> None:
    """As transformers' Trainer has it, and not a mean of the batches' means."""
    if workers == 1:
        results = [[gradients(None, once)] for once in (False, True)]
    else:
        results = [pool.run(gradients, workers, once) for once in (False, True)]
    for (*many, found), (*one, expected) in zip(*results, strict=True):
        assert many == pytest.approx(one, rel=1e-6)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-7, rtol=1e-5)


def test_a_run_resumes_after_any_step(tmp_path: Path) -> None:
    given = {"parallel": "none", **TWICE}
    full = run_toy(None, ToyTask("dropout"), RunOptions(), **given)
    run_toy(None, ToyTask("dropout"), RunOptions(save=tmp_path, save_every=1, steps=3), **given)
    rest = run_toy(None, ToyTask("dropout"), RunOptions(resume=tmp_path), **given)
    assert [step.step for step in rest.steps] == [4]
    assert rest.end.parameters_sha256 == full.end.parameters_sha256


def failure(group: Any, given: dict[str, Any]) -> str:
    nan_at = int(epoch_order(80, seed=0, epoch=0)[30])  # of chunks of 6 samples, the last one of the second batch
    try:
        run_toy(group, ToyTask(nan_at=nan_at), RunOptions(), **given, **TWICE)
    except NotFiniteError as error:
        return str(error)
    return ""


def test_a_chunk_that_is_not_finite_is_reported_by_its_number_in_the_step(pool: Pool) -> None:
    for received in (failure(None, {"parallel": "none", "chunks": 3}), pool.run(failure, 2, {"compress": "none"})[0]):
        assert "step 1" in received
        assert "chunk 5" in received
