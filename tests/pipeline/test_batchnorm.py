"""Batch norm and recomputation in chunks: the same numbers as the same chunks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.models import batch, cut, reference
from tests.pipeline.pipelines import make, run_step, twins
from tests.pool import Pool
from thinpipe.pipeline.batchnorm import DeferredStatistics, frozen_statistics

CHUNKS = 4


def normed(units: int = 4, width: int = 32) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.0)) for _ in range(units)
    ]


def follow(group: Any, layout: str, order: str, recompute: bool) -> None:
    """Plain batch norm: gradients and running statistics as the same chunks leave them in one process."""
    piped, plain = normed(), normed()
    stages, schedule = make(group, layout, order, CHUNKS, piped, recompute=recompute)
    for step in range(3):
        x, y = batch(seed=step)
        for unit in (*piped, *plain):
            unit.zero_grad()
        reference(plain, x, y, CHUNKS)
        run_step(stages, schedule, x, y)
        for stage in stages:
            for p, q in twins(stage.submod, piped, plain):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    for stage in stages:
        state = nn.Sequential(*plain).state_dict()
        names = {id(v): k for k, v in nn.Sequential(*piped).named_buffers()}
        for buffer in stage.submod.buffers():
            torch.testing.assert_close(buffer, state[names[id(buffer)]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("layout", ["linear", "client-server"])
def test_batch_norm_in_a_pipeline(pool: Pool, layout: str, order: str, recompute: bool) -> None:
    pool.run(follow, 2, layout, order, recompute)


def split_backward(group: Any) -> str:
    stages, _ = make(group, "linear", "gpipe", CHUNKS, normed(), recompute=True)
    stages[0].has_backward = True
    try:
        stages[0].backward_one_chunk(0, full_backward=False)
    except ValueError as error:
        return str(error)
    return ""


def test_recomputation_refuses_split_backwards(pool: Pool) -> None:
    assert "needs unsplit backward passes" in pool.run(split_backward, 2)[0]


def deferred(group: Any, recompute: bool) -> None:
    """Deferred: running statistics as if each step had been one batch, in the first unit, whose input is the same."""
    piped, plain = normed(), normed()
    options = {"deferred_batch_norm": True, "recompute": recompute}
    stages, schedule = make(group, "linear", "gpipe", CHUNKS, piped, **options)
    for step in range(3):
        x, y = batch(seed=step)
        run_step(stages, schedule, x, y)
        plain[0](x)
    if stages[0].is_first:
        for name, buffer in plain[0].named_buffers():
            torch.testing.assert_close(dict(piped[0].named_buffers())[name], buffer, rtol=1e-5, atol=1e-6)
    later = cut(piped, 2)[1]
    assert all(int(b) == 3 for n, b in later.named_buffers() if "tracked" in n) == bool(stages[0].is_last)


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_deferred_statistics_see_complete_batches(pool: Pool, recompute: bool) -> None:
    pool.run(deferred, 2, recompute)


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 5), (8, 6, 3, 3)], ids=["1d", "1d sequence", "2d"])
def test_deferred_equals_one_batch(shape: tuple[int, ...], momentum: float | None) -> None:
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    chunked, full = kind(6, momentum=momentum), kind(6, momentum=momentum)
    statistics = DeferredStatistics(chunked)
    for step in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(step)) * 3 + 2
        full(x)
        for part in x.chunk(4):
            chunked(part)
        statistics.commit()
    for name, buffer in full.named_buffers():
        torch.testing.assert_close(dict(chunked.named_buffers())[name], buffer)


def test_frozen_statistics_learn_nothing() -> None:
    norm = nn.BatchNorm1d(4)
    statistics = DeferredStatistics(norm)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    with frozen_statistics(norm):
        norm(torch.randn(8, 4))
    statistics.commit()
    assert norm.track_running_stats
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
