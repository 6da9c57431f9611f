"""Quantizers of bitsandbytes behind the contract of codecs, to be held against: known only to the codec benchmark."""

from __future__ import annotations

import importlib
import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from thinpipe.codecs import Codec
from thinpipe.codecs.base import as_bytes, as_dtype


@dataclass(frozen=True)
class Outside(Codec):
    """Codes of whole blocks of values, then each block's largest magnitude as float32."""

    name: str
    bits: int
    block: int  # what bitsandbytes takes for weights (nf4) and for the states of optimizers (8 bits)

    @property
    def spec(self) -> str:
        return self.name

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        count = math.prod(shape)
        return self._code_bytes(count) + 4 * -(-count // self.block)

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        functional, values = _functional(), x.reshape(-1).float()
        if self.bits == 4:
            codes, found = functional.quantize_4bit(values, blocksize=self.block, quant_type=self.name)
        else:
            codes, found = functional.quantize_blockwise(values, blocksize=self.block)
        split = self._code_bytes(x.numel())
        wire[:split].copy_(codes.reshape(-1))
        wire[split:].copy_(as_bytes(found.absmax))

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        functional = _functional()
        split = self._code_bytes(out.numel())
        codes, largest = wire[:split], as_dtype(wire[split:], torch.float32)
        if self.bits == 4:
            found = functional.QuantState(
                largest, torch.Size([out.numel()]), blocksize=self.block, quant_type=self.name, dtype=torch.float32
            )
            values = functional.dequantize_4bit(codes[:, None], found)
        else:
            values = functional.dequantize_blockwise(codes, absmax=largest, blocksize=self.block)
        out.view(-1).copy_(values.reshape(-1))

    def _code_bytes(self, count: int) -> int:
        return -(-count * self.bits // 8)


_ALL = {each.name: each for each in (Outside("nf4", 4, 64), Outside("int8-blockwise", 8, 256))}
NAMES = tuple(_ALL)


def outside_codec(name: str) -> Codec:
    """The quantizer of that name; ValueError where bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"{name} is a quantizer of bitsandbytes, which is missing: pip install 'thinpipe[compare]'")
    return _ALL[name]


def _functional() -> Any:
    return importlib.import_module("bitsandbytes.functional")
