"""Clipping stage by stage is clipping the full model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from thinpipe.train.engines.finite import sum_of_squares
from thinpipe.train.engines.step import clip, norm_of


@pytest.mark.parametrize("limit", [0.1, 1e6], ids=["above the limit", "below it"])
def test_stages_together_clip_as_one_model(limit: float) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model(torch.randn(5, 6)).square().sum().backward()
    full = copy.deepcopy(model)
    for twin, parameter in zip(full.parameters(), model.parameters(), strict=True):
        twin.grad = parameter.grad.clone()  # type: ignore[union-attr]
    stages = [model[:2], model[2:]]

    norm = norm_of(sum_of_squares(stage.parameters()) for stage in stages)
    for stage in stages:
        clip(stage.parameters(), norm, limit)

    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(full.parameters(), limit)), rel=1e-6)
    for twin, parameter in zip(full.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad)


def test_one_value_that_is_not_finite_shows_in_the_sum() -> None:
    model = nn.Linear(3, 3)
    model(torch.randn(2, 3)).sum().backward()
    model.weight.grad[1, 1] = float("inf")  # type: ignore[index]
    assert not torch.tensor(sum_of_squares(model.parameters())).isfinite()


def test_gradients_that_are_all_zero_stay_so() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.zeros(3)
    clip([weight], norm_of([sum_of_squares([weight])]), 1.0)
    assert weight.grad.tolist() == [0, 0, 0]


def test_the_sum_of_squares_is_that_of_each_gradient_in_float32_or_wider() -> None:
    torch.manual_seed(0)
    weights = [
        nn.Parameter(torch.ones(size, dtype=kind)) for kind in (torch.bfloat16, torch.float32) for size in (3, 700)
    ]
    for weight in weights:
        weight.grad = 300 * torch.randn_like(weight)
    each = [torch.linalg.vector_norm(weight.grad.float()).double() for weight in weights]  # type: ignore[union-attr]
    assert sum_of_squares([*weights, nn.Parameter(torch.ones(2))]) == float(torch.stack(each).square().sum())
    assert sum_of_squares([nn.Parameter(torch.ones(2))]) == 0
