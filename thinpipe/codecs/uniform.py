"""uniform:B: one minimum and one step for the whole tensor."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinpipe.codecs import kernels as kernel_modules
from thinpipe.codecs.base import Codec
from thinpipe.codecs.layout import header_bytes, packed_bytes


@dataclass(frozen=True)
class Uniform(Codec):
    """``bits`` bits per value; the tensor's minimum and maximum travel exactly."""

    bits: int
    kernels: str = field(default="auto", kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"{self.bits} bits are not from 1 to 16")

    @property
    def spec(self) -> str:
        return f"uniform:{self.bits}"

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return header_bytes(2) + packed_bytes(math.prod(shape), self.bits)

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None) -> None:
        kernel_modules.select(self.kernels, x.device).encode_uniform(x, wire, self.bits)

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        kernel_modules.select(self.kernels, out.device).decode_buckets(wire, out, self.bits, 0)
