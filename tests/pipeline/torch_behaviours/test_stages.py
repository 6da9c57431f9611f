"""Options of torch's stage and schedules: shapes, keyword arguments, chunks, own gradients of weights, memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from tests.pipeline.torch_behaviours.pipelines import KINDS, LINEAR, LOOPED, LOSS, ROWS, V_SHAPED, WIDTH, Pipeline
from tests.pipeline.torch_behaviours.test_models import CHUNKS, WAYS
from tests.pool import Pool

by_kind = pytest.mark.parametrize("kind", KINDS)
by_schedule = pytest.mark.parametrize(("schedule", "placement"), WAYS, ids=lambda each: getattr(each, "__name__", ""))


def static_shapes(group: Any, kind: str, schedule: Any, placement: Any, requires_grad: bool) -> None:
    def examples(index: int) -> dict[str, Any]:
        given = torch.zeros(ROWS, WIDTH, requires_grad=requires_grad and index > 0)
        return {"input_args": given, "output_args": (torch.zeros(ROWS, WIDTH, requires_grad=requires_grad),)}

    pipeline = Pipeline(kind, group, placement, schedule, CHUNKS, stage_options=examples)
    for _ in range(2):
        pipeline.zero_grad()
        pipeline.check_step(*pipeline.step())


@by_kind
@by_schedule
@pytest.mark.parametrize("requires_grad", [True, False])
def test_static_shapes(pool: Pool, requires_grad: bool, schedule: Any, placement: Any, kind: str) -> None:
    if kind == "torch" and not requires_grad:
        pytest.skip("torch 2.13 trains only with examples that require gradients")
    pool.run(static_shapes, 2, kind, schedule, placement, requires_grad)


def keyword_arguments(group: Any, kind: str, schedule: Any, placement: Any, requires_grad: bool) -> None:
    """Every stage gets its chunk of a tensor that is no activation."""
    pipeline = Pipeline(kind, group, placement, schedule, CHUNKS)
    scale = torch.linspace(0.9, 1.1, CHUNKS * ROWS)[:, None].requires_grad_(requires_grad)
    for _ in range(2):
        pipeline.zero_grad()
        losses: list[Tensor] = []
        target = pipeline.y if pipeline.is_last else None
        output = pipeline.schedule.step(*pipeline.inputs, target=target, losses=losses, scale=scale)
        pipeline.check_step(output, losses, scale=scale.detach())


@by_kind
@by_schedule
@pytest.mark.parametrize("requires_grad", [False, True])
def test_keyword_arguments(pool: Pool, requires_grad: bool, schedule: Any, placement: Any, kind: str) -> None:
    pool.run(keyword_arguments, 2, kind, schedule, placement, requires_grad)


def columns(group: Any, kind: str) -> None:
    """The first stage's input is cut along its second dimension."""
    pipeline = Pipeline(kind, group, LINEAR, pipelining.ScheduleGPipe, CHUNKS, args_chunk_spec=(TensorChunkSpec(1),))
    pipeline.here[0].register_forward_pre_hook(lambda module, inputs: inputs[0].t() if inputs[0].dim() == 2 else inputs)
    rows, pipeline.x = pipeline.x, pipeline.x.t().contiguous()
    output, losses = pipeline.step()
    pipeline.x = rows
    pipeline.check_step(output, losses)


@pytest.mark.parametrize("kind", KINDS[1:])  # torch's stage sends contiguous tensors only
def test_other_dimension_of_chunks(pool: Pool, kind: str) -> None:
    pool.run(columns, 2, kind)


def loss_options(group: Any, kind: str) -> None:
    """Keyword arguments of the loss, and a list that held something before."""

    def loss(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
        return weight * LOSS(output, target)

    pipeline = Pipeline(kind, group, LINEAR, pipelining.Schedule1F1B, CHUNKS, loss_fn=loss)
    losses = [torch.zeros(())] * 9
    target = pipeline.y if pipeline.is_last else None
    output = pipeline.schedule.step(*pipeline.inputs, target=target, losses=losses, loss_kwargs={"weight": 1.0})
    pipeline.check_step(output, losses)


@by_kind
def test_options_of_losses(pool: Pool, kind: str) -> None:
    pool.run(loss_options, 2, kind)


def own_weight_gradients(group: Any, kind: str, schedule: Any, placement: Any) -> int:
    calls = 0

    def builder() -> Any:
        def run() -> None:
            nonlocal calls
            calls += 1

        return run

    pipeline = Pipeline(kind, group, placement, schedule, CHUNKS, stage_options=lambda _: {"dw_builder": builder})
    pipeline.check_step(*pipeline.step())
    return calls


@by_kind
@by_schedule
def test_functions_for_gradients_of_weights(pool: Pool, schedule: Any, placement: Any, kind: str) -> None:
    calls = pool.run(own_weight_gradients, 2, kind, schedule, placement)
    assert calls == [CHUNKS * len(placement[worker]) for worker in (0, 1)]


def memory(group: Any, kind: str, schedule: Any, placement: Any) -> None:
    """After a step only the last stage keeps outputs; those of all others are freed by their backward."""
    pipeline = Pipeline(kind, group, placement, schedule, CHUNKS)
    pipeline.step()
    outputs: list[Any] = []
    for index in pipeline.indices:
        pipeline.here[index].register_forward_hook(
            lambda module, inputs, output, index=index: outputs.append((index, weakref.ref(output)))
        )
    gc.collect()
    gc.disable()
    try:
        pipeline.step()
    finally:
        gc.enable()
    assert len(outputs) == CHUNKS * len(pipeline.indices)
    assert {index for index, output in outputs if output() is not None} <= {len(pipeline.here) - 1}
    for stage in pipeline.stages:
        assert not stage.fwd_cache
        assert len(stage.output_chunks) == (CHUNKS if stage.is_last else 0)
        stage.clear_runtime_states()
        assert not stage.output_chunks


@by_kind
@by_schedule
def test_memory_of_outputs(pool: Pool, schedule: Any, placement: Any, kind: str) -> None:
    pool.run(memory, 2, kind, schedule, placement)


def many_steps(group: Any, kind: str, schedule: Any) -> None:
    """Parameters follow those of the full model over twenty updates."""
    placement = {"ScheduleGPipe": LINEAR, "ScheduleInterleaved1F1B": LOOPED}.get(schedule.__name__, V_SHAPED)
    pipeline = Pipeline(kind, group, placement, schedule, CHUNKS)
    models = (pipeline.here, pipeline.full)
    optimizers = [torch.optim.SGD(torch.nn.ModuleList(each).parameters(), lr=1e-4) for each in models]
    for _ in range(20):
        pipeline.zero_grad()
        pipeline.step()
        pipeline.reference()
        for optimizer in optimizers:
            optimizer.step()
    for index in pipeline.indices:
        for mine, plain in zip(pipeline.here[index].parameters(), pipeline.full[index].parameters(), strict=True):
            assert float((mine - plain).detach().norm() / plain.detach().norm()) < 1e-4


@by_kind
@pytest.mark.parametrize(
    "schedule",
    [pipelining.ScheduleGPipe, pipelining.ScheduleInterleaved1F1B, pipelining.ScheduleZBVZeroBubble],
)
def test_many_steps(pool: Pool, schedule: Any, kind: str) -> None:
    pool.run(many_steps, 2, kind, schedule)
