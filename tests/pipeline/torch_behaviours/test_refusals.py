"""Errors of thinpipe's stage where torch's rejects, hangs or computes wrong results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from tests.pipeline.torch_behaviours.custom import actions_of
from tests.pipeline.torch_behaviours.pipelines import (
    KINDS,
    LINEAR,
    LOOPED,
    ROWS,
    V_SHAPED,
    WIDTH,
    Block,
    Pipeline,
    Placement,
    blocks,
)
from thinpipe.comm.errors import WorkerError
from thinpipe.launch.workers import run_workers

CHUNKS = 4
OURS = KINDS[1:]


def make(
    kind: str, schedule: Any = pipelining.ScheduleGPipe, placement: Placement = LINEAR, **options: Any
) -> Pipeline:
    return Pipeline(kind, dist.group.WORLD, placement, schedule, options.pop("chunks", CHUNKS), **options)


def refuse(kind: str, case: str) -> None:
    torch.set_num_threads(1)
    CASES[case](kind)


def second_step(kind: str, change: Callable[[nn.Module], object], modules: Any = blocks) -> None:
    """A step, a change to the first stage, and another step."""
    pipeline = make(kind, modules=modules)
    pipeline.step()
    if pipeline.is_first:
        change(pipeline.here[0])
    pipeline.step()


def returning(change: Callable[[Any], Any]) -> Callable[[nn.Module], object]:
    return lambda module: module.register_forward_hook(lambda module, inputs, output: change(output))


class Pair(Block):
    """A stage with two outputs and two inputs."""

    count = 2

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        output = super().forward(x if y is None else x + y)
        return (output,) * self.count if self.count > 1 else output


def pairs(count: int) -> list[nn.Module]:
    made = blocks(count, Pair)
    made[-1].count = 1  # type: ignore[assignment]
    return made


def batch_of(kind: str, rows: int, *, steps_before: int) -> None:
    pipeline = make(kind)
    for _ in range(steps_before):
        pipeline.step()
    pipeline.x = pipeline.y = torch.ones(rows, WIDTH)
    pipeline.step()


def integers(kind: str) -> None:
    pipeline = make(kind)
    pipeline.step()
    pipeline.x = pipeline.x.int()
    pipeline.step()


def thaw(kind: str, schedule: Any, placement: Placement) -> None:
    pipeline = make(kind, schedule, placement, modules=lambda count: _freeze(blocks(count)))
    pipeline.step()
    for module in pipeline.here:
        module.requires_grad_(True)
    pipeline.step()


def _freeze(made: list[nn.Module]) -> list[nn.Module]:
    made[0].requires_grad_(False)
    return made


def other_shapes(kind: str) -> None:
    """Examples of shapes that do not match those of the neighbour."""

    def examples(index: int) -> dict[str, Tensor]:
        rows = ROWS if index == 0 else ROWS // 2
        return {"input_args": torch.zeros(rows, WIDTH), "output_args": torch.zeros(ROWS, WIDTH)}

    make(kind, stage_options=examples).step()


def other_placement(kind: str) -> None:
    pipeline = make(kind, pipelining.ScheduleInterleaved1F1B, LOOPED)
    pipeline.step()
    for stage in pipeline.stages:
        stage.stage_index_to_group_rank = {0: 0, 1: 0, 2: 1, 3: 1}
    pipeline.step()


class WithoutSends(PipelineScheduleMulti):
    """Computes, and never asks for what sends and receives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._validate_and_set_stage_mapping(actions_of(("0F0 1F0 1B0 0B0",)))

    def _step_microbatches(self, arg_mbs: Any = None, *args: Any, **kwargs: Any) -> None:
        self._initialize_stages(arg_mbs[0], {}, kwargs.get("target_mbs"))
        self._stages[0].forward_one_chunk(0, arg_mbs[0], {})
        self._stages[1].forward_one_chunk(0, (), {})


def without_hand_over(kind: str) -> None:
    group = dist.new_group([0], use_local_synchronization=True) if dist.get_rank() == 0 else None
    if group is not None:
        pipeline = Pipeline(kind, group, {0: (0, 1)}, WithoutSends, 1, loss_fn=None)
        pipeline.schedule.step(pipeline.x)


def own_weight_gradients(kind: str) -> None:
    stage = make(kind, stage_options=lambda _: {"dw_builder": lambda: None}).stages[0]
    stage.has_backward = True
    stage.backward_weight_one_chunk(0)


def without_target(kind: str) -> None:
    pipeline = make(kind)
    pipeline.schedule.step(*pipeline.inputs)


def without_gradients(kind: str) -> None:
    with torch.no_grad():
        make(kind).step()


CASES: dict[str, Callable[[str], None]] = {
    "flat output": lambda kind: second_step(kind, returning(Tensor.flatten)),
    "other dtype": lambda kind: second_step(kind, returning(Tensor.bfloat16)),
    "more outputs": lambda kind: second_step(kind, returning(lambda output: (output, output))),
    "an output that is None": lambda kind: second_step(kind, returning(lambda output: (output, None))),
    "fewer outputs": lambda kind: second_step(kind, lambda module: setattr(module, "count", 1), pairs),
    "a dictionary": lambda kind: second_step(kind, returning(lambda output: {"x": output})),
    "more rows": lambda kind: batch_of(kind, CHUNKS * ROWS + 4, steps_before=1),
    "a row more": lambda kind: batch_of(kind, CHUNKS * ROWS + 1, steps_before=1),
    "fewer rows": lambda kind: batch_of(kind, CHUNKS * ROWS // 2, steps_before=1),
    "uneven chunks": lambda kind: batch_of(kind, CHUNKS * ROWS - 2, steps_before=0),
    "fewer rows than chunks": lambda kind: batch_of(kind, CHUNKS - 2, steps_before=0),
    "no rows": lambda kind: batch_of(kind, 0, steps_before=0),
    "no chunks": lambda kind: make(kind, chunks=0).step() and None,
    "fewer chunks than stages": lambda kind: make(kind, pipelining.Schedule1F1B, chunks=1) and None,
    "integers instead of floats": integers,
    "a stage that is trained later": lambda kind: thaw(kind, pipelining.ScheduleGPipe, LINEAR),
    "a stage of a V that is trained later": lambda kind: thaw(kind, pipelining.ScheduleZBVZeroBubble, V_SHAPED),
    "shapes that do not match": other_shapes,
    "numbers of chunks that do not match": lambda kind: make(kind, chunks=2 + 2 * dist.get_rank()).step() and None,
    "another placement": other_placement,
    "no hand-over": without_hand_over,
    "weights before inputs": own_weight_gradients,
    "no target": without_target,
    "no gradients": without_gradients,
    "losses that are no list": lambda kind: make(kind).schedule.step(torch.ones(32, WIDTH), losses=()),
}
MESSAGES = {
    "flat output": r"was set up for float32\[8, 128\], but tensor 0 of chunk 0 is float32\[1024\]",
    "other dtype": r"was set up for float32\[8, 128\], but tensor 0 of chunk 0 is bfloat16\[8, 128\]",
    "more outputs": r"set up for \(float32\[8, 128\]\), but chunk 0 is \(float32\[8, 128\], float32\[8, 128\]\)",
    "an output that is None": r"was set up for \(float32\[8, 128\]\), but chunk 0 is \(float32\[8, 128\], NoneType\)",
    "fewer outputs": r"set up for \(float32\[8, 128\], float32\[8, 128\]\), but chunk 0 is \(float32\[8, 128\]\)",
    "a dictionary": r"was set up for \(float32\[8, 128\]\), but chunk 0 is \(dict\)",
    "more rows": r"but tensor 0 of chunk 0 is float32\[9, 128\]. Pad or drop a batch",
    "a row more": r"but tensor 0 of chunk 0 is float32\[9, 128\]. Pad or drop a batch",
    "fewer rows": r"but tensor 0 of chunk 0 is float32\[4, 128\]. Pad or drop a batch",
    "uneven chunks": r"but tensor 0 of chunk 2 is float32\[7, 128\]. Pad or drop a batch",
    "fewer rows than chunks": r"Tensor size 2 is smaller than num_chunks|Expecting 4 arg_mbs but got 2",
    "no rows": r"Tensor size 0 is smaller than num_chunks|number of sections must be larger than 0",
    "no chunks": r"number of sections must be larger than 0, got 0",
    "fewer chunks than stages": r"Number of microbatches \(1\) must be greater",
    "integers instead of floats": r"must have the same dtype, but got Int and Float",
    "a stage that is trained later": r"stage 0 was frozen then, and some of its parameters require gradients",
    "a stage of a V that is trained later": r"stage 0 was frozen then, and some of its parameters require gradients",
    "shapes that do not match": r"activations from stage 0 to stage 1: \[.float32\[8, 128\].\] on worker 0",
    "numbers of chunks that do not match": r"chunks per step: 2 on worker 0; 4 on worker 1",
    "another placement": r"ran with its stages on workers 0, 1, 0, 1 and now .* on 0, 0, 1, 1",
    "no hand-over": r"forward of stage 1, chunk 0: stage 0 on the same worker has not handed over its outputs",
    "weights before inputs": r"without first calling `backward_one_chunk\(full_backward=False\)`",
    "no target": r"loss_fn and target required for last stage",
    "no gradients": r"step\(\) requires gradients to be enabled",
    "losses that are no list": r"losses must be a list but got",
}


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("case", CASES)
def test_errors(case: str, kind: str) -> None:
    with pytest.raises(WorkerError, match=MESSAGES[case]):
        run_workers(refuse, kind, case, workers=2)
