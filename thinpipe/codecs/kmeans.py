"""kmeans:B: scalar k-means quantization: a codebook of the 2^B values with the least squared error."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.codecs.base import KernelCodec
from thinpipe.codecs.layout import header_bytes, packed_bytes


@dataclass(frozen=True)
class KMeans(KernelCodec):
    """A scalar k-means quantizer: values are sent as indices into a codebook of 2^bits values in the header."""

    bits: int
    zero: bool = False  # one codebook value is zero, if there are values on both sides of it

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"{self.bits} bits are not from 1 to 8")

    @property
    def spec(self) -> str:
        return f"kmeans:{self.bits}" + "+zero" * self.zero

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return header_bytes(1 << self.bits) + packed_bytes(math.prod(shape), self.bits)

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        self.kernels_on(x.device).encode_kmeans(x, wire, self.bits, self.zero)

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        self.kernels_on(out.device).decode_kmeans(wire, out, self.bits)
