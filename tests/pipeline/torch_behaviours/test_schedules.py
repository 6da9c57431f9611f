"""Every schedule of torch trains and evaluates with thinpipe's stage as with torch's: gradients, losses, outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _ScheduleForwardOnly

from tests.pipeline.torch_behaviours.custom import (
    Callback,
    FromRows,
    LateSends,
    Unbalanced,
    VShaped,
    VShapedZeroBubble,
    ZeroBubble,
)
from tests.pipeline.torch_behaviours.pipelines import KINDS, LINEAR, LOOPED, LOSS, V_SHAPED, Pipeline, Placement, close
from tests.pool import Pool

UNBALANCED: Placement = {0: (0, 1, 4), 1: (2, 3)}
SCHEDULES: list[tuple[Any, Placement]] = [
    (pipelining.ScheduleGPipe, LINEAR),
    (pipelining.Schedule1F1B, LINEAR),
    (pipelining.ScheduleInterleaved1F1B, LOOPED),
    (pipelining.ScheduleLoopedBFS, LOOPED),
    (pipelining.ScheduleInterleavedZeroBubble, LOOPED),
    (pipelining.ScheduleZBVZeroBubble, V_SHAPED),
    (pipelining.ScheduleDualPipeV, V_SHAPED),
]
CUSTOM: list[tuple[Any, Placement, int]] = [
    (VShaped, V_SHAPED, 1),
    (Unbalanced, UNBALANCED, 1),
    (VShapedZeroBubble, V_SHAPED, 1),
    (ZeroBubble, LOOPED, 2),
    (LateSends, {0: (0,), 1: (1,), 2: (2,)}, 2),
]
CHUNKS = 4


def train_and_evaluate(group: Any, kind: str, schedule: Any, placement: Placement, chunks: int) -> None:
    """Evaluate before the first step and between steps; no evaluation changes a gradient."""
    pipeline = Pipeline(kind, group, placement, schedule, chunks)
    # With neighbours on one worker, evaluation is an AssertionError of torch's stage.
    evaluates = kind != "torch" or placement != V_SHAPED
    if evaluates:
        _evaluate(pipeline)
        assert all(gradient is None for gradient in pipeline.gradients())
    for _ in range(2):
        pipeline.zero_grad()
        pipeline.check_step(*pipeline.step())
        if evaluates and kind != "torch":  # torch scales the gradients again under PipelineScheduleMulti
            before = [gradient.clone() for gradient in pipeline.gradients()]
            _evaluate(pipeline)
            assert all(map(torch.equal, before, pipeline.gradients()))


def _evaluate(pipeline: Pipeline) -> None:
    output, losses = pipeline.evaluate()
    expected, _ = pipeline.reference()
    pipeline.check_output(output, expected)
    assert len(losses) == (pipeline.chunks if pipeline.is_last else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("schedule", "placement"), SCHEDULES, ids=lambda each: getattr(each, "__name__", ""))
def test_training_and_evaluation(pool: Pool, kind: str, schedule: Any, placement: Placement) -> None:
    pool.run(train_and_evaluate, 2, kind, schedule, placement, CHUNKS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("schedule", "placement", "chunks"), CUSTOM, ids=lambda each: getattr(each, "__name__", ""))
def test_custom_schedules(pool: Pool, kind: str, schedule: Any, placement: Placement, chunks: int) -> None:
    """Also with neighbouring stages on one worker, to which torch's stage would send through the network."""
    if kind == "torch" and issubclass(schedule, FromRows) and placement != LOOPED:
        pytest.skip("torch's stage sends to its own rank, which gloo cannot")
    pool.run(train_and_evaluate, len(placement), kind, schedule, placement, chunks)


def train_over_four_workers(group: Any, kind: str, schedule: Any) -> None:
    pipeline = Pipeline(kind, group, {worker: (worker, 7 - worker) for worker in range(4)}, schedule, 8)
    for _ in range(2):
        pipeline.zero_grad()
        pipeline.check_step(*pipeline.step())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", [pipelining.ScheduleZBVZeroBubble, pipelining.ScheduleDualPipeV])
def test_v_schedules_of_eight_stages(pool: Pool, kind: str, schedule: Any) -> None:
    pool.run(train_over_four_workers, 4, kind, schedule)


def without_outputs(group: Any, kind: str, schedule: Any, placement: Placement) -> None:
    pipeline = Pipeline(kind, group, placement, schedule, CHUNKS)
    output, losses = pipeline.step(return_outputs=False)
    assert output is None
    assert all(not stage.output_chunks for stage in pipeline.stages)
    _, loss = pipeline.reference()
    if pipeline.is_last:
        close(torch.stack(losses).sum(), loss)
    pipeline.check_gradients()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("schedule", "placement"), SCHEDULES, ids=lambda each: getattr(each, "__name__", ""))
def test_steps_without_outputs(pool: Pool, kind: str, schedule: Any, placement: Placement) -> None:
    pool.run(without_outputs, 2, kind, schedule, placement)


def with_callback(group: Any, kind: str) -> None:
    pipeline = Pipeline(kind, group, V_SHAPED, pipelining.ScheduleZBVZeroBubble, CHUNKS)
    callback = Callback()
    callback.register(pipeline.schedule)
    pipeline.check_step(*pipeline.step())
    assert sorted(callback.chunks) == [(index, chunk) for index in pipeline.indices for chunk in range(CHUNKS)]


def from_csv(group: Any, kind: str, path: str) -> None:
    """The schedule of each step is read from a file that torch wrote, with or without sends and receives."""
    pipeline = Pipeline(kind, group, LOOPED, pipelining.ScheduleInterleavedZeroBubble, CHUNKS)
    written = pipeline.schedule
    for actions in ("compute_only", "compute_comms"):
        mine = f"{path}.{actions}.{group.rank()}"
        written._dump_csv(mine, format=actions)
        read = _PipelineScheduleRuntime(pipeline.stages, CHUNKS, loss_fn=LOSS, scale_grads=False)
        read._load_csv(mine, format=actions)
        pipeline.schedule = read
        pipeline.zero_grad()
        pipeline.check_step(*pipeline.step())


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_from_csv_files(pool: Pool, kind: str, tmp_path: Path) -> None:
    pool.run(from_csv, 2, kind, str(tmp_path / "schedule"))


def forward_only(group: Any, kind: str) -> None:
    pipeline = Pipeline(kind, group, LINEAR, _ScheduleForwardOnly, CHUNKS, loss_fn=None)
    for _ in range(5):
        output = pipeline.schedule.step(*pipeline.inputs)
        if not pipeline.is_last:
            assert output is None
        pipeline.check_output(output, pipeline.reference()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_forward_only(pool: Pool, kind: str) -> None:
    pool.run(forward_only, 2, kind)


def two_schedules(group: Any, kind: str) -> None:
    """A second schedule of the same stages cuts batches into fewer chunks."""
    pipeline = Pipeline(kind, group, LINEAR, pipelining.ScheduleGPipe, CHUNKS)
    pipeline.check_step(*pipeline.step())
    pipeline.chunks = CHUNKS // 2
    pipeline.schedule = pipelining.ScheduleGPipe(pipeline.stages[0], CHUNKS // 2, loss_fn=LOSS, scale_grads=False)
    pipeline.zero_grad()
    pipeline.check_step(*pipeline.step())


@pytest.mark.parametrize("kind", KINDS)
def test_two_schedules_of_one_stage(pool: Pool, kind: str) -> None:
    pool.run(two_schedules, 2, kind)


def scaled(group: Any, kind: str, schedule: Any, placement: Placement, chunks: int) -> None:
    """Gradients are divided by the number of chunks, once in a step."""
    pipeline = Pipeline(kind, group, placement, schedule, chunks, scale_grads=True)
    pipeline.step()
    pipeline.reference()
    for module in pipeline.full:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad /= chunks
    pipeline.check_gradients()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("schedule", "placement", "chunks"),
    [(*each, CHUNKS) for each in SCHEDULES] + [(ZeroBubble, LOOPED, 2)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_scaled_gradients(pool: Pool, kind: str, schedule: Any, placement: Placement, chunks: int) -> None:
    pool.run(scaled, 2, kind, schedule, placement, chunks)


@pytest.mark.parametrize("kind", KINDS)
def test_custom_function_for_forwards(pool: Pool, kind: str) -> None:
    pool.run(with_callback, 2, kind)
