"""Stages that are replicated as well: two pipelines of two workers, whose stages DDP or FSDP keeps alike."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.pipeline.models import batch
from tests.pipeline.torch_behaviours.pipelines import KINDS, LOOPED, LOSS, ROWS, WIDTH, blocks, make_stage
from tests.pool import Pool

CHUNKS = 4


def replicated(group: Any, kind: str, wrapper: str, schedule: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    replica, worker = mesh["replica"].get_local_rank(), mesh["pipeline"].get_local_rank()
    is_looped = schedule is not pipelining.Schedule1F1B
    count, indices = (4, LOOPED[worker]) if is_looped else (2, (worker,))
    made, full = blocks(count), blocks(count)
    if wrapper == "ddp":
        modules: list[Any] = [
            DistributedDataParallel(made[i], process_group=mesh["replica"].get_group()) for i in indices
        ]
    else:
        modules = [fully_shard(made[i], mesh=mesh["replica"]) for i in indices]
    pipeline = mesh["pipeline"].get_group()
    stages = [make_stage(kind, pipeline, each, i, count) for each, i in zip(modules, indices, strict=True)]
    runner = schedule(stages if is_looped else stages[0], CHUNKS, loss_fn=LOSS, scale_grads=False)
    x, y = batch(2 * CHUNKS * ROWS, WIDTH)
    own, target = x.chunk(2)[replica], y.chunk(2)[replica]
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        runner.step(*([own] if 0 in indices else []), target=target if count - 1 in indices else None)
    LOSS(nn.Sequential(*full)(x), y).backward()
    errors = []
    for module, index in zip(modules, indices, strict=True):
        for mine, plain in zip(module.parameters(), full[index].parameters(), strict=True):
            assert plain.grad is not None
            errors.append(_error(2 * (mine.grad if wrapper == "ddp" else mine.grad.full_tensor()), plain.grad))
    assert max(errors) < (0.15 if kind == "8bit" else 1e-4)
    assert kind != "8bit" or max(errors) > 1e-4


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("wrapper", "schedule"),
    [
        ("ddp", pipelining.Schedule1F1B),
        ("fsdp", pipelining.Schedule1F1B),
        ("fsdp", pipelining.ScheduleInterleavedZeroBubble),
    ],
)
def test_replicated_stages(pool: Pool, wrapper: str, schedule: Any, kind: str) -> None:
    pool.run(replicated, 4, kind, wrapper, schedule)
