"""Who holds what of a model, and what will travel in a step: known before the first one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One stage: who has it, and what is in it."""

    stage: int
    worker: int
    first_unit: int
    units: int
    unit_names: tuple[str, ...]
    parameters: int
    trained: int  # of them


def counts(parameters: Iterable[nn.Parameter]) -> dict[str, int]:
    """How many values these hold, and how many of them are trained: two fields of a holding."""
    sizes = [(each.numel(), each.requires_grad) for each in parameters]
    return {"parameters": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """One direction of one link, per step of training."""

    source: int  # stages
    target: int
    source_worker: int
    target_worker: int
    direction: Literal["forward", "backward"]
    spec: str  # of the codec
    shapes: tuple[tuple[int, ...], ...]  # of the tensors of one chunk
    tensor_bytes: int
    wire_bytes: int  # at most
    integer_bytes: int = 0  # of those, masks and other integers that may need fewer: as many bits as their range
    # Of a step whose samples were never sent before (delta), or before the first axes are known.
    first_wire_bytes: int | None = None
    learned_bytes: int = 0  # of ``wire_bytes``, axes that travel every so many steps: their mean
