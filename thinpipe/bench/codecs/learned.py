"""axes:B without a link: known only to the codec benchmark, which shows it one tensor and gives it another.

On a link moments of many steps are learned from, so axes are better known there, and older.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinpipe.codecs import axes
from thinpipe.codecs.base import Codec
from thinpipe.codecs.principal import Learner


@dataclass(frozen=True)
class Learned(Codec):
    """What travels, and of what was learned the part that a step has of it on average."""

    bits: float
    _bases: dict[torch.Size, axes.Basis] = field(default_factory=dict, compare=False, repr=False)

    @property
    def spec(self) -> str:
        return f"axes:{self.bits:g}"

    def takes(self, shape: torch.Size) -> bool:
        """Whether tensors of a shape have rows with axes; a link sends others otherwise."""
        return axes.rows_of(shape, self.bits, 1) is not None

    def learn(self, x: Tensor) -> None:
        """Take the axes of a tensor for all of its shape."""
        rows, kept = self._rows(x.shape), dict[str, Tensor]()
        learner = Learner(kept, rows, self.bits)
        learner.add(rows.columns(x))
        learner.fold()
        learner.start()
        told, forth = learner.take()
        self._bases[x.shape] = axes.Basis.read(told, rows, forth)

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        rows = self._rows(shape)
        return rows.wire_bytes(self.bits) + math.ceil(rows.learned_bytes / rows.every(self.bits, 1))

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        rows = self._rows(x.shape)
        axes.encode(rows.columns(x), self._bases[x.shape], rows, wire[: rows.wire_bytes(self.bits)])

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        rows = self._rows(out.shape)
        axes.decode(wire[: rows.wire_bytes(self.bits)], self._bases[out.shape], rows, out)

    def _rows(self, shape: torch.Size) -> axes.Rows:
        rows = axes.rows_of(shape, self.bits, 1)
        assert rows is not None
        return rows
