"""A pipeline stage of training: it runs under autocast if asked, and notes where values stop being finite.

Names of torch's inside used here, seen on 2.11 and 2.13: ``forward_maybe_with_nosync``, which runs the module, and
``bwd_cache``, the input gradients of each chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinpipe.pipeline.stage import PipelineStage


class CheckedStage(PipelineStage):
    """Keeps the sum of each chunk's outputs and input gradients: one cheap read, and no wait for a GPU.

    A sum is finite unless one of its terms is not, or they are so large that they might as well not be.
    """

    def __init__(self, *args: Any, amp: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.amp = amp
        self.output_sums: dict[int, Tensor] = {}  # by chunk, of the last step
        self.gradient_sums: dict[int, Tensor] = {}

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.amp):
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.output_sums[fwd_chunk_id] = sum_of(output if isinstance(output, tuple) else (output,))
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.gradient_sums[bwd_chunk_id] = sum_of(self.bwd_cache.get(bwd_chunk_id, ()))


def sum_of(values: Iterable[Any]) -> Tensor:
    """The sum of all floats in these tensors, in float32: half precision would overflow."""
    floats = [value.detach() for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return torch.stack([value.sum(dtype=torch.float32) for value in floats]).sum() if floats else torch.zeros(())


def not_finite(sums: dict[int, Tensor]) -> list[int]:
    """The chunks whose sums are not finite. On a GPU this waits for them."""
    return sorted(chunk for chunk, total in sums.items() if not torch.isfinite(total))
