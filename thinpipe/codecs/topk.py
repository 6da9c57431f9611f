"""topk:F: top-k sparsification: the fraction F of values with the largest magnitude and their positions."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.codecs.base import KernelCodec
from thinpipe.codecs.layout import positions_are_bits


@dataclass(frozen=True)
class TopK(KernelCodec):
    """A top-k sparsifier; the other values become zero. Of equal magnitudes the first ones are kept.

    The kept values are sent as float32, in the tensor's order. Their positions are sent as a mask of one bit per value
    of the tensor or as one int32 per kept value, whichever is smaller: the mask from a fraction of 1/32 on.
    """

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:  # NaN fails this too
            raise ValueError(f"{self.fraction} is not above 0 and at most 1")

    @property
    def spec(self) -> str:
        return f"topk:{self.fraction:g}" if float(f"{self.fraction:g}") == self.fraction else f"topk:{self.fraction!r}"

    def kept(self, count: int) -> int:
        """Return the number of values kept of ``count``: at least one."""
        return max(1, round(self.fraction * count))

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        count = math.prod(shape)
        kept = self.kept(count)
        return 4 * kept + (-(-count // 8) if positions_are_bits(count, kept) else 4 * kept)

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        self.kernels_on(x.device).encode_topk(x, wire, self.kept(x.numel()))

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        self.kernels_on(out.device).decode_topk(wire, out, self.kept(out.numel()))
