"""Small models to cut, and the same computation in one process to hold pipelines against."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


def reference(units: list[nn.Module], x: Tensor, y: Tensor, chunks: int) -> float:
    """Gradients of the mean loss over chunks, computed in this process; returns the loss."""
    losses = []
    for part, target in zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True):
        for unit in units:
            part = unit(part)
        loss = nn.functional.mse_loss(part, target)
        (loss / chunks).backward()
        losses.append(float(loss.detach()))
    return sum(losses) / chunks
