"""Optimizers, and the learning rate as a pure function of the step.

A name of torch's inside used here, seen on 2.11 and 2.13: ``AdamW._init_group``, which lists what a step updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.workloads.task import LrSchedule, Optimizer

SLICE = 1 << 20  # values that AdamW updates at a time on a CPU


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
    return SlicedAdamW([group for group in groups if group["params"]], lr=lr)


class SlicedAdamW(torch.optim.AdamW):
    """torch's, to the bit, which on a CPU takes a large parameter slice by slice.

    There an update makes tensors as large as the parameter, three at a time. A client's largest one, its embeddings, is
    most of what it has: it would need half as much memory again.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        *tensors, _, steps = lists  # parameters, gradients, averages, averages of squares
        rows = list(zip(*tensors, steps, strict=True))
        for each in lists:
            each.clear()
        for *row, step in rows:
            cut = row[0].numel() > SLICE and all(each.device.type == "cpu" and each.is_contiguous() for each in row)
            parts = [each.detach().view(-1).split(SLICE) if cut else (each,) for each in row]
            for number, part in enumerate(zip(*parts, strict=True)):
                for each, tensor in zip(tensors, part, strict=True):
                    each.append(tensor)
                steps.append(step.clone() if number else step)  # every slice counts up its own
        return has_complex


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
