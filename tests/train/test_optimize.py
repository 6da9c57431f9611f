"""Schedules against torch's own; which parameters decay."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from thinpipe.lab.bench.meter import peak_extra_bytes
from thinpipe.train.optimize import SLICE, learning_rate, make_optimizer

PEAK, STEPS = 0.3, 40


def torchs(schedule: str, rising: int) -> list[float]:
    """The rates of torch's schedulers: a linear warm-up, then one of theirs."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    falling = STEPS - rising
    after: lr_scheduler.LRScheduler = {
        "constant": lambda: lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, T_max=falling),
        "linear": lambda: lr_scheduler.PolynomialLR(optimizer, total_iters=falling, power=1.0),
    }[schedule]()
    if rising:
        up = lr_scheduler.LinearLR(optimizer, start_factor=1 / rising, total_iters=max(rising - 1, 1))
        whole: lr_scheduler.LRScheduler = lr_scheduler.SequentialLR(optimizer, [up, after], milestones=[rising])
    else:
        whole = after
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        whole.step()
    return rates


@pytest.mark.parametrize("rising", [0, 8])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_rates_are_those_of_torchs_schedulers(schedule: str, rising: int) -> None:
    mine = [
        learning_rate(step, steps=STEPS, peak=PEAK, schedule=schedule, warmup=rising / STEPS)  # type: ignore[arg-type]
        for step in range(STEPS)
    ]
    assert mine == pytest.approx(torchs(schedule, rising), rel=1e-6, abs=1e-9)


def test_adamw_decays_weights_but_no_biases_and_no_norms() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = make_optimizer(model.parameters(), optimizer="adamw", lr=0.1, momentum=0.9, weight_decay=0.5)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.5, 0.0, 0.0, 0.0]


def test_adamw_in_slices_is_torchs_to_the_bit_and_needs_no_copies_of_a_parameter() -> None:
    shapes = [(12, SLICE), (2, SLICE // 2 + 77), (5, 7), (1, SLICE + 1), (SLICE, 2)]
    mine, theirs = ([nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2))
    for p, q in zip(mine, theirs, strict=True):
        q.data.copy_(p.data)
    for parameters in (mine, theirs):  # strides of another order, as those of convolutions have
        parameters[-1].data = parameters[-1].data.t().contiguous().t()
    sliced = make_optimizer(mine, optimizer="adamw", lr=0.1, momentum=0.9, weight_decay=0.5)
    plain = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.5)
    extra: list[list[int]] = []
    for _ in range(4):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        extra.append([peak_extra_bytes(optimizer.step) or 0 for optimizer in (sliced, plain)])
        for p, q in zip(mine, theirs, strict=True):
            assert torch.equal(p, q)
            assert sliced.state[p].keys() == plain.state[q].keys()
            assert all(torch.equal(sliced.state[p][name], plain.state[q][name]) for name in plain.state[q])
    # The first step allocates its state. Of the others the middle one: single ones were seen 8 MB off either way.
    mine_extra, their_extra = (statistics.median(each) for each in zip(*extra[1:], strict=True))
    limit = 3 * 4 * 2 * SLICE + (12 << 20)  # three of the one that is not cut, and those
    assert mine_extra < limit < 4 * 12 * SLICE < their_extra


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_has_the_betas_it_is_given(dtype: torch.dtype) -> None:
    mine, theirs = nn.Parameter(torch.zeros(3, 3, dtype=dtype)), nn.Parameter(torch.zeros(3, 3))
    given = make_optimizer([mine], optimizer="adamw", lr=0.1, momentum=0.9, weight_decay=0.0, adam_betas=(0.5, 0.25))
    plain = torch.optim.AdamW([theirs], lr=0.1, betas=(0.5, 0.25), weight_decay=0.0)
    for gradient in (1.0, -3.0, 0.25):
        mine.grad, theirs.grad = (torch.full_like(each, gradient) for each in (mine, theirs))
        given.step()
        plain.step()
    assert torch.equal(mine, theirs.to(dtype))


def test_sgd_has_momentum_and_decays_everything() -> None:
    model = nn.Linear(4, 4)
    optimizer = make_optimizer(model.parameters(), optimizer="sgd", lr=0.1, momentum=0.8, weight_decay=0.5)
    assert [(g["momentum"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [(0.8, 0.5, 2)]


def test_nesterov_looks_ahead() -> None:
    weights = []
    for nesterov in (False, True):
        weight = nn.Parameter(torch.ones(1))
        optimizer = make_optimizer([weight], optimizer="sgd", lr=0.1, momentum=0.5, weight_decay=0.0, nesterov=nesterov)
        weight.grad = torch.ones(1)
        optimizer.step()
        weights.append(weight.item())
    assert weights == pytest.approx([0.9, 0.85])  # by the gradient; and by half of it again
