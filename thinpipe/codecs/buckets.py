"""uniform:B, sort:Q+S, fast:Q+S: min-max and quantile quantization.

``uniform`` is min-max quantization with one minimum and one step for the entire tensor. ``sort`` and ``fast`` divide
the values into 2^S buckets of equal population, each with a minimum and a step of its own and Q-bit uniform levels.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinpipe.codecs.base import KernelCodec
from thinpipe.codecs.layout import header_bytes, packed_bytes, read_header


@dataclass(frozen=True)
class Buckets(KernelCodec):
    """A quantile quantizer with a minimum and step per bucket, so a dense middle and long tails both keep detail.

    ``sort`` and ``fast`` are Algorithms 1 and 2: the references sort or take kth values; the wires are the same.
    ``uniform`` has one bucket.
    """

    name: Literal["uniform", "sort", "fast"]
    level_bits: int
    split_bits: int
    zero: bool = False  # zeros are exact; otherwise the minimum and maximum of each bucket are

    def __post_init__(self) -> None:
        if self.name == "uniform" and not 1 <= self.level_bits <= 16:
            raise ValueError(f"{self.level_bits} bits are not from 1 to 16")
        if self.level_bits < 1:
            raise ValueError(f"{self.level_bits} level bits are not 1 or more")
        if not 0 <= self.split_bits <= 8:
            raise ValueError(f"{self.split_bits} split bits are not from 0 to 8")
        if self.bits > 16:
            raise ValueError(f"{self.level_bits}+{self.split_bits} bits are more than 16")
        if self.zero and self.level_bits < 2:
            raise ValueError("+zero needs 2 level bits or more: of two levels one would be zero, and one sign be lost")

    @property
    def bits(self) -> int:
        return self.level_bits + self.split_bits

    @property
    def spec(self) -> str:
        split = "" if self.name == "uniform" else f"+{self.split_bits}"
        return f"{self.name}:{self.level_bits}{split}{'+zero' * self.zero}"

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return header_bytes(2 << self.split_bits) + packed_bytes(math.prod(shape), self.bits)

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        module = self.kernels_on(x.device)
        encode = module.encode_fast if self.name == "fast" else module.encode_sort
        encode(x, wire, self.level_bits, self.split_bits, self.zero)

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        module = self.kernels_on(out.device)
        module.decode_buckets(wire, out, self.level_bits, self.split_bits)

    def mins_and_steps(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Return the minimum and the step of each bucket of a wire, M and P in the algorithms."""
        lo, hi = read_header(wire, 2 << self.split_bits).double().view(2, -1)
        return lo.float(), ((hi - lo) / ((1 << self.level_bits) - 1)).float()
