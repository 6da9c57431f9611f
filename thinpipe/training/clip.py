"""Gradient clipping over all stages together: each sums its squares, the sum of the sums gives one norm for all."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

_EPSILON = 1e-6  # as torch's clip_grad_norm_: a norm of zero divides nothing


def sum_of_squares(parameters: Iterable[nn.Parameter]) -> float:
    """Of all gradients of one stage; not finite if one of them is not."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(gradient).double() for gradient in gradients])
    return float(norms.square().sum())


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale one stage's gradients, given the norm of those of all stages, so that the latter is within the limit."""
    factor = limit / (norm + _EPSILON)
    if factor < 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def norm_of(squares: Iterable[float]) -> float:
    return math.sqrt(math.fsum(squares))
