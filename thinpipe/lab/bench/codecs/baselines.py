"""Baselines of the codec benchmark: bitsandbytes quantizers, and PCA transform coding without a link.

The quantizers of bitsandbytes implement the ``Codec`` interface. ``axes:B`` without a link estimates its PCA basis from
one tensor and encodes another; on a link the basis comes from the moments of many steps, so it is estimated better
there, and is older.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from thinpipe.codecs.base import Codec, as_bytes, as_dtype
from thinpipe.links.learned.learner import BasisLearner
from thinpipe.links.learned.row_layout import Rows, rows_of
from thinpipe.links.learned.transform import Basis, decode, encode


@dataclass(frozen=True)
class BitsAndBytes(Codec):
    """A bitsandbytes quantizer: the codes of blocks of values, then each block's absolute maximum as float32."""

    name: str
    bits: int
    block: int  # bitsandbytes' block size for weights (nf4) and for optimizer states (8 bits)

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


_BASELINES = {each.name: each for each in (BitsAndBytes("nf4", 4, 64), BitsAndBytes("int8-blockwise", 8, 256))}
BASELINES = tuple(_BASELINES)


def baseline_codec(name: str) -> Codec:
    """Return the quantizer of that name; raise ValueError if bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"{name} is a quantizer of bitsandbytes, which is missing: pip install 'thinpipe[compare]'")
    return _BASELINES[name]


def _functional() -> Any:
    return importlib.import_module("bitsandbytes.functional")


@dataclass(frozen=True)
class OfflinePCA(Codec):
    """PCA transform coding (``axes:B``) without a link; its size includes the basis, averaged over steps."""

    bits: float
    _bases: dict[torch.Size, Basis] = field(default_factory=dict, compare=False, repr=False)

    @property
    def spec(self) -> str:
        return f"axes:{self.bits:g}"

    def takes(self, shape: torch.Size) -> bool:
        """Return True if tensors of a shape can be transformed; a link uses another codec otherwise."""
        return rows_of(shape, self.bits, 1) is not None

    def learn(self, x: Tensor) -> None:
        """Estimate the PCA basis from a tensor and use it for all tensors of its shape."""
        rows, kept = self._rows(x.shape), dict[str, Tensor]()
        learner = BasisLearner(kept, rows, self.bits)
        learner.add(rows.columns(x))
        learner.fold()
        learner.start()
        encoded, projection = learner.take()
        self._bases[x.shape] = Basis.read(encoded, rows, self.bits, projection)

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        rows = self._rows(shape)
        return rows.wire_bytes(self.bits) + math.ceil(rows.basis_bytes / rows.every(self.bits, 1))

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        rows = self._rows(x.shape)
        encode(rows.columns(x), self._bases[x.shape], rows, wire[: rows.wire_bytes(self.bits)])

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        rows = self._rows(out.shape)
        decode(wire[: rows.wire_bytes(self.bits)], self._bases[out.shape], rows, out)

    def _rows(self, shape: torch.Size) -> Rows:
        rows = rows_of(shape, self.bits, 1)
        assert rows is not None
        return rows
