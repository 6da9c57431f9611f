"""What comes out of every unit of a model for one chunk, and what it costs: every worker finds the same by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from thinpipe.pipeline.balance import UnitCost


@dataclass(frozen=True)
class Meta:
    """A tensor's shape and type, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True  # whether anything is that it was made by

    @property
    def has_gradient(self) -> bool:
        return self.trained and self.dtype.is_floating_point

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def example(self, device: torch.device, *, gradient: bool = True) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype, device=device)
        return tensor.requires_grad_(gradient and self.has_gradient)

    def zeros(self, device: torch.device, *, gradient: bool = False) -> Tensor:
        """An example that any unit can compute with: zero is a token, too."""
        return self.example(device, gradient=False).zero_().requires_grad_(gradient and self.has_gradient)


@dataclass(frozen=True)
class Traced:
    """One unit, run on one chunk."""

    outputs: tuple[Meta, ...]
    flops: int  # forward


def meta_of(tensors: Sequence[Tensor]) -> tuple[Meta, ...]:
    return tuple(Meta(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def trace_units(units: Sequence[nn.Module], inputs: Sequence[Meta], *, amp: bool, device: torch.device) -> list[Traced]:
    """Run a chunk of zeros through all units, without gradients and as in evaluation, which changes nothing.

    Operations are counted rather than timed, so that all workers, and a run that is taken up again, cut the model
    alike.
    """
    modes = [unit.training for unit in units]
    values: tuple[Tensor, ...] = tuple(meta.zeros(device) for meta in inputs)
    traced = []
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
            for unit in units:
                # One at a time: the whole model need not fit this worker's device.
                with FlopCounterMode(display=False) as counter:
                    output = unit.to(device).eval()(*values)
                unit.cpu()
                values = output if isinstance(output, tuple) else (output,)
                traced.append(Traced(meta_of(values), counter.get_total_flops()))
    finally:
        for unit, mode in zip(units, modes, strict=True):
            unit.train(mode)
    return traced


def costs_of(traced: Sequence[Traced]) -> list[UnitCost]:
    """What ``choose_cuts`` balances: only proportions count, so operations stand in for time."""
    return [UnitCost(max(unit.flops, 1) * 1e-6, sum(meta.bytes for meta in unit.outputs)) for unit in traced]
