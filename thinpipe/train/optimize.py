"""Optimizers, and the learning rate as a pure function of the step.

Private name of torch used here, seen on 2.11 and 2.13: ``AdamW._init_group``, which lists what a step updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import LrSchedule, Optimizer

SLICE = 1 << 20  # values that AdamW updates at a time on a CPU
PORTION = 1 << 24  # minimum number of values whose gradients are converted to float32 at a time
MASTER = "master"  # the name of a float32 copy in checkpoints
OPTIMIZER_OPTIONS = ("optimizer", "lr", "momentum", "weight_decay", "nesterov", "adam_betas")


def learning_rate(step: int, *, steps: int, peak: float, schedule: LrSchedule, warmup: float) -> float:
    """Return the learning rate of step ``step``, counted from 0, of ``steps``.

    It rises linearly over the first fraction ``warmup`` of the steps; the step after them has ``peak``. Then it is
    ``constant``, or decays to 0 along half a ``cosine`` or linearly (``linear``). It would reach 0 one step after the
    last.

    With 10 steps, a warm-up of 0.2 and linear decay: 0.5, 1, 1, 0.875, ... 0.125 of the peak.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    if schedule == "constant":
        return peak
    part = (step - rising) / max(steps - rising, 1)
    return peak * (0.5 * (1 + math.cos(math.pi * part)) if schedule == "cosine" else 1 - part)


def make_optimizer(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters; ``options`` are those of ``Settings`` from ``OPTIMIZER_OPTIONS``.

    If a parameter is in bfloat16, the optimizer updates float32 copies (``MasterWeights``).
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if any(parameter.dtype == torch.bfloat16 for parameter in trained):
        return MasterWeights(trained, partial(_float_optimizer, **options))
    return _float_optimizer(trained, **options)


def _float_optimizer(
    trained: Iterable[nn.Parameter],
    *,
    optimizer: Optimizer,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool = False,
    adam_betas: tuple[float, float] = Settings.adam_betas,
) -> torch.optim.Optimizer:
    """Return SGD with momentum, or AdamW without weight decay for biases and norm scales (one dimension or none)."""
    trained = list(trained)
    if optimizer == "sgd":
        # As a group: torch rejects an empty list, which a worker without trained parameters would have.
        group = [{"params": trained}]
        return torch.optim.SGD(group, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    on_gpu = bool(trained) and all(parameter.is_cuda for parameter in trained)
    groups = [group for group in groups if group["params"]] or groups[:1]
    return SlicedAdamW(groups, lr=lr, betas=adam_betas, fused=on_gpu or None)


class SlicedAdamW(torch.optim.AdamW):
    """torch's AdamW, bit-identical, which on a CPU updates a large parameter slice by slice.

    On a CPU an update allocates tensors as large as the parameter, three at a time. A client's largest parameter, its
    embeddings, is most of what it has: the client would need half as much memory again.
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
                steps.append(step.clone() if number else step)  # every slice increments its own counter
        return has_complex


class MasterWeights(torch.optim.Optimizer):
    """An optimizer that updates float32 master copies of narrower parameters, and rounds them into the parameters.

    An update is often smaller than half a step of bfloat16, whose numbers are 0.4 to 0.8% apart: applied directly to
    the parameter, it would be rounded away every time. Gradients are converted to float32 for some parameters at a
    time, so that not all of them are in memory twice.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], make: Callable[..., torch.optim.Optimizer]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        super().__init__(trained, {})
        self._masters = {each: nn.Parameter(each.detach().float()) for each in trained}
        self._wide = make(self._masters.values())
        self.param_groups = self._wide.param_groups  # shared: a learning rate set here takes effect

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for some in self._portions():
            for parameter, master in some:
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            self._wide.step()  # skips parameters without a gradient
            for parameter, master in some:
                parameter.copy_(master)
                master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._masters:
            parameter.grad = None

    def kept(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter, including its master copy; empty if it is not trained."""
        master = self._masters.get(parameter)
        if master is None:
            return {}
        return {**self._wide.state.get(master, {}), MASTER: master.detach()}

    @torch.no_grad()
    def load_state_for(self, parameter: nn.Parameter, what: str, value: Tensor) -> None:
        master = self._masters[parameter]
        if what == MASTER:
            master.copy_(value)
        else:
            self._wide.state[master][what] = value

    def _portions(self) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
        some: list[tuple[nn.Parameter, nn.Parameter]] = []
        for parameter, master in self._masters.items():
            if parameter.grad is not None:
                some.append((parameter, master))
            if sum(each.numel() for each, _ in some) >= PORTION:
                yield some
                some = []
        if some:
            yield some


def state_for(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the optimizer state of a parameter, to be saved."""
    if isinstance(optimizer, MasterWeights):
        return optimizer.kept(parameter)
    return dict(optimizer.state.get(parameter, {}))


def load_state_for(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, what: str, value: Tensor) -> None:
    """Load one of the tensors that ``state_for`` returned."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    value = value.to(parameter.device) if value.dim() or fused else value  # other step counts stay on the CPU
    if isinstance(optimizer, MasterWeights):
        optimizer.load_state_for(parameter, what, value)
    else:
        optimizer.state[parameter][what] = value


def optimizer_bytes(parameters: Iterable[nn.Parameter], name: Optimizer) -> int:
    """Return the size of the optimizer state of parameters: averages, and float32 copies of those in bfloat16."""
    averages = {"sgd": 1, "adamw": 2}[name]
    return sum(
        each.numel() * max(each.element_size(), 4) * (averages + (each.dtype == torch.bfloat16)) for each in parameters
    )
