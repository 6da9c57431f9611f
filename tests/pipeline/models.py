"""Small models to cut, and the same computation in one process to hold pipelines against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import thinpipe
from thinpipe import Codec

WIDTH = 32


def seeded(units: int = 5, width: int = WIDTH, seed: int = 0) -> list[nn.Module]:
    """Units of a model; every worker makes the same ones and keeps its own."""
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(units)]


def cut(units: list[nn.Module], stages: int) -> list[nn.Sequential]:
    """Units to stages, as evenly as they go."""
    return [nn.Sequential(*(units[i] for i in part)) for part in torch.arange(len(units)).tensor_split(stages)]


def batch(size: int = 32, width: int = WIDTH, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, width, generator=generator), torch.randn(size, width, generator=generator)


class Through(torch.autograd.Function):
    """A link in one process: what arrives is what the codec leaves of a tensor, in both directions."""

    @staticmethod
    def forward(context: Any, x: Tensor, forward: Codec, backward: Codec, states: tuple[dict, dict]) -> Tensor:
        context.codec, context.state = backward, states[1]
        return _there_and_back(forward, x, states[0])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _there_and_back(context.codec, gradient, context.state), None, None, None


def _there_and_back(codec: Codec, x: Tensor, state: dict) -> Tensor:
    return codec.decode(codec.encode(x, state=state), torch.empty_like(x, memory_format=torch.contiguous_format))


def link_states(stages: int) -> list[tuple[dict, dict] | None]:
    """Return the codec state of each link, forward and backward, for ``reference``."""
    return [({}, {}) for _ in range(stages)]


def reference(
    stages: Sequence[nn.Module], x: Tensor, y: Tensor, chunks: int, spec: str = "none", links: Any = None
) -> float:
    """Gradients of the mean loss over chunks, all forwards first, computed in this process; returns the loss.

    A link whose state is None is none: its two stages are on one worker.
    """
    links = links or link_states(len(stages))
    losses = []
    for part, target in zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True):
        for index, stage in enumerate(stages):
            if index and spec != "none" and links[index] is not None:
                part = Through.apply(part, thinpipe.codec(spec), thinpipe.codec(spec), links[index])
            part = stage(part)
        losses.append(nn.functional.mse_loss(part, target))
    for loss in losses:
        loss.backward()
    for parameter in nn.ModuleList(stages).parameters():  # as torch's schedules do: what travels is not scaled
        parameter.grad.div_(chunks)
    return float(torch.stack(losses).detach().mean())
