"""Optimizers, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from thinpipe.workloads.task import LrSchedule, Optimizer


def learning_rate(step: int, *, steps: int, peak: float, schedule: LrSchedule, warmup: float) -> float:
    """The rate of step ``step``, counted from 0, of so many.

    Over the first ``warmup`` part of the steps it rises in equal bites up to ``peak``, which the step after them has.
    From there it stays (``constant``), falls along half a cosine, or falls in a straight line (``polynomial``, as
    RoBERTa's recipe calls it), and would be 0 one step after the last.

    With 10 steps, a warm-up of 0.2 and a polynomial: 0.5, 1, 1, 0.875, ... 0.125 of the peak.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    if schedule == "constant":
        return peak
    part = (step - rising) / max(steps - rising, 1)
    return peak * (0.5 * (1 + math.cos(math.pi * part)) if schedule == "cosine" else 1 - part)


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    name: Optimizer,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW, which decays no biases and no scales of norms (what has one dimension or none)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trained, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
