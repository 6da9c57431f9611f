"""Codecs on links: what is sent has the promised size, and gradients are off by the codec's error and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import thinpipe
from tests.pipeline.models import batch, cut, link_states, reference, seeded
from tests.pipeline.pipelines import make, run_step, twins
from tests.pool import Pool
from thinpipe.links.message import CHECKSUM_BYTES
from thinpipe.links.send import SendLink
from thinpipe.pipeline import PipelineStage

SPECS = ["fp16", "bf16", "uniform:8", "sort:6+2", "fast:6+2", "kmeans:4", "tile:4", "svd:2", "power:2", "topk:0.25"]
WIDTH, CHUNKS, UNITS = 256, 4, 8  # 32 rows in 4 chunks: messages of 8 kB, too large to travel raw
SINGLE = ["ScheduleGPipe", "Schedule1F1B"]
LOOPED = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
V = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


def check(stages: list[PipelineStage], schedule: Any, piped: list[nn.Module], spec: str) -> None:
    """Two steps; in the second, sizes and gradients are held against the codec in one process, and against none."""
    count = stages[0].num_stages
    exact, lossy, states = seeded(UNITS, WIDTH), seeded(UNITS, WIDTH), link_states(count)
    placement = schedule.stage_index_to_group_rank if len(stages) > 1 else {}
    for stage in range(1, len(placement)):
        if placement[stage] == placement[stage - 1]:  # in V schedules: handed over, nothing travels
            states[stage] = None
    sizes: list[int] = []
    isend = dist.isend

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return isend(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counted)
        patch.setattr(dist.distributed_c10d, "isend", counted)  # where torch checks that operations are sends
        for step in range(2):
            x, y = batch(width=WIDTH, seed=step)
            for unit in [*piped, *exact, *lossy]:
                unit.zero_grad()
            reference(cut(exact, count), x, y, CHUNKS)
            reference(cut(lossy, count), x, y, CHUNKS, spec, states)
            sizes.clear()  # of the first step, in which torch also sends shapes
            run_step(stages, schedule, x, y)

    message = thinpipe.codec(spec).wire_bytes((len(x) // CHUNKS, WIDTH), torch.float32) + CHECKSUM_BYTES
    sends = [link for stage in stages for link in stage.links if isinstance(link, SendLink)]
    assert sizes == [message] * len(sends) * CHUNKS
    for link in sends:
        counters = link.counters()
        assert counters.messages == 2 * CHUNKS
        assert counters.wire_bytes == 2 * CHUNKS * message
        assert counters.tensor_bytes == 2 * CHUNKS * (len(x) // CHUNKS) * WIDTH * 4
        assert counters.encode_ms > 0
    for stage in stages:
        for p, q in twins(stage.submod, piped, lossy):
            assert p.grad is not None
            assert _distance(p.grad, q.grad) < 1e-4
        for p, q in twins(stage.submod, piped, exact):
            assert _distance(p.grad, q.grad) > 1e-6


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def own_schedule(group: Any, layout: str, spec: str, post_ahead: bool | None = None) -> None:
    piped = seeded(UNITS, WIDTH)
    options = {"forward": spec, "backward": spec, "post_ahead": post_ahead}
    stages, schedule = make(group, layout, "gpipe", CHUNKS, piped, **options)
    check(stages, schedule, piped, spec)


def torch_schedule(group: Any, name: str, spec: str, post_ahead: bool | None = None) -> None:
    workers, worker = group.size(), group.rank()
    count = workers * (1 if name in SINGLE else 2)
    mine = [worker, count - 1 - worker] if name in V else list(range(worker, count, workers))
    piped = seeded(UNITS, WIDTH)
    modules = cut(piped, count)
    stages = [
        PipelineStage(
            modules[index], index, count, "cpu", group=group, forward=spec, backward=spec, post_ahead=post_ahead
        )
        for index in mine
    ]
    schedule: Callable[..., Any] = getattr(pipelining.schedules, name)
    stage_or_stages: Any = stages[0] if name in SINGLE else stages
    check(stages, schedule(stage_or_stages, CHUNKS, nn.functional.mse_loss), piped, spec)


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        *zip(SPECS, ["linear", "client-server"] * 5, strict=True),
        ("uniform:8", "client-server"),  # in both layouts: a codec without memory, and one with
        ("power:2", "client-server"),
    ],
)
def test_codec_on_every_link(pool: Pool, spec: str, layout: str) -> None:
    pool.run(own_schedule, 3, layout, spec)


@pytest.mark.parametrize("name", SINGLE + LOOPED + V)
def test_under_torch_schedules(pool: Pool, name: str) -> None:
    pool.run(torch_schedule, 2, name, "uniform:8")


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_in_the_order_of_the_schedule(pool: Pool, name: str) -> None:
    """The way of backends without tags: the schedule starts and awaits every operation."""
    pool.run(torch_schedule, 2, name, "uniform:8", False)
