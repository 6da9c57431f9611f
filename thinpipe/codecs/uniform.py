"""uniform:B: min-max quantization with one minimum and one step for the entire tensor."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.codecs.base import KernelCodec
from thinpipe.codecs.layout import check_room_for_zero, header_bytes, packed_bytes


@dataclass(frozen=True)
class Uniform(KernelCodec):
    """A uniform quantizer of ``bits`` bits; exact for the tensor's minimum and maximum, or with ``zero`` its zeros."""

    bits: int
    zero: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"{self.bits} bits are not from 1 to 16")
        if self.zero:
            check_room_for_zero(self.bits)

    @property
    def leaves_less(self) -> bool:
        return self.bits > 1  # two levels are only the ends of the range

    @property
    def spec(self) -> str:
        return f"uniform:{self.bits}" + "+zero" * self.zero

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return header_bytes(2) + packed_bytes(math.prod(shape), self.bits)

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        self.kernels_on(x.device).encode_uniform(x, wire, self.bits, self.zero)

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        self.kernels_on(out.device).decode_buckets(wire, out, self.bits, 0)
