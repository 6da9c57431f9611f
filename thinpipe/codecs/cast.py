"""none, fp16, bf16: the tensor's own bytes, or its values cast to 16-bit floats."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinpipe.codecs.base import FLOATS, Codec, as_dtype, write_values

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cast(Codec):
    """A cast: ``none`` keeps the tensor as it is; ``fp16`` and ``bf16`` round it to 16 bits, overflow to infinity."""

    name: Literal["none", "fp16", "bf16"]

    @property
    def spec(self) -> str:
        return self.name

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        wire_dtype = _DTYPES.get(self.name, dtype)
        # With `none` the receiver infers the float type from the wire size. float16 and bfloat16 have the same size,
        # so a bfloat16 wire has one zero byte more: a header would have to be read back from the GPU.
        marker = int(self.name == "none" and wire_dtype == torch.bfloat16)
        return math.prod(shape) * wire_dtype.itemsize + marker

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        wire_dtype = _DTYPES.get(self.name, x.dtype)
        payload = x.numel() * wire_dtype.itemsize
        write_values(wire[:payload], x, wire_dtype)
        wire[payload:].zero_()

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        wire_dtype = _DTYPES.get(self.name) or next(
            dtype for dtype in FLOATS if self.float_bytes(out.shape, dtype) == wire.numel()
        )
        payload = out.numel() * wire_dtype.itemsize
        out.view(-1).copy_(as_dtype(wire[:payload], wire_dtype))
