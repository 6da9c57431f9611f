"""What a stage expects from a neighbour for every chunk, read from the receive infos that torch prepares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Expected:
    """A tensor that torch expects from a neighbour for every chunk."""

    shape: torch.Size
    dtype: torch.dtype
    gradient: bool  # a gradient goes the other way, or this is one

    @staticmethod
    def of(info: Any) -> Expected:
        if info.buffer is None:  # torch 2.13 knows that this output has no gradient
            return Expected(torch.Size(), torch.uint8, False)
        meta = getattr(info, "tensor_meta", None)  # torch 2.13; before, every input had a gradient
        differentiable = info.buffer.is_floating_point() or info.buffer.is_complex()
        is_gradient = info.input_name.startswith("recv_grad")
        wanted = differentiable and (meta is None or is_gradient or meta.requires_grad)
        return Expected(info.buffer.shape, info.buffer.dtype, wanted)

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)
