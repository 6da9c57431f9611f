"""The layout of tensors as rows of values that vary together, and of rows as groups of axes.

A row has the values of a token, or of a square of pixels in all channels. Wide rows are split into groups with separate
axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

MAX_AXES = 512  # of a group: their matrix has 256 kB, and its eigendecomposition takes a core 50 ms
MIN_AXES = 16
BLOCKS = (8, 4, 2, 1)  # pixels: the sides that squares of an image may have

# A learned basis may take this share of a link's bytes. It becomes stale: if it would be sent less often than every
# MAX_INTERVAL steps, rows are split into more groups with fewer axes each. On hidden states and on pictures, more
# groups cost more accuracy than a stale basis until it is MAX_INTERVAL steps old.
BASIS_SHARE = 0.05
MAX_INTERVAL = 64
MIN_INTERVAL = 5  # steps: on a GPU, about the time in which a core computes the axes of two links


@dataclass(frozen=True)
class Rows:
    """The layout of tensors of one shape as rows, and of rows as groups of axes."""

    shape: torch.Size
    groups: int
    size: int  # axes of a group
    block: int = 0  # side of the squares of pixels that are a row; 0: a row is the last dimension
    more_bits: tuple[float, ...] = ()  # per value: of further allocations in a basis, after the first

    @property
    def rotated(self) -> bool:
        """True if squares go through a Hadamard transform, so that correlated values are in one group."""
        return self.block > 1 and self.groups > 1

    @cached_property
    def width(self) -> int:
        """The number of values in a row."""
        return self.shape[1] * self.block**2 if self.block else self.shape[-1]

    @cached_property
    def count(self) -> int:
        return math.prod(self.shape) // self.width

    @property
    def key(self) -> tuple[int, ...]:
        """The properties that tensors must share to use the same axes."""
        return self.width, self.groups, self.size, self.block

    def planes(self, bits: float) -> int:
        """Return the number of bits of a row."""
        return math.floor(bits * self.width)

    def wire_bytes(self, bits: float) -> int:
        return 2 * self.count + self.planes(bits) * -(-self.count // 8)

    @property
    def basis_parts(self) -> tuple[int, int, int, int]:
        """The bytes of the parts of an encoded basis: mean, deviations, axes and bits (``Basis``)."""
        total = self.groups * self.size
        return 4 * total, 4 * total, total * self.size, total * (1 + len(self.more_bits))

    @property
    def basis_bytes(self) -> int:
        return sum(self.basis_parts)

    def every(self, bits: float, chunks: int) -> int:
        """Return the interval between two updates of the basis, in steps of ``chunks`` chunks."""
        return max(MIN_INTERVAL, math.ceil(self.basis_bytes / (BASIS_SHARE * chunks * self.wire_bytes(bits))))

    def columns(self, x: Tensor) -> Tensor:
        """Return a tensor as float32 [groups, size, count], one row per column; the last group is zero-padded."""
        if self.block:
            images, channels, height, width = self.shape
            side = self.block
            squares = x.reshape(images, channels, height // side, side, width // side, side).permute(1, 3, 5, 0, 2, 4)
            values = squares.reshape(channels, side * side, -1).float()
            if self.rotated:
                values = _rotated(values).transpose(0, 1)  # sorted by coefficient
            values = values.reshape(self.width, -1)
        else:
            values = x.reshape(-1, self.width).float().T
        missing = self.groups * self.size - self.width
        if missing:
            values = torch.nn.functional.pad(values, (0, 0, 0, missing))
        return values.unflatten(0, (self.groups, self.size))

    def view(self, out: Tensor) -> Tensor | None:
        """Return a view of a tensor in the layout of ``columns``; None if that needs a copy."""
        if self.block or out.dtype != torch.float32 or self.groups * self.size != self.width or not out.is_contiguous():
            return None
        return out.view(-1, self.groups, self.size).permute(1, 2, 0)

    def restore(self, columns: Tensor, out: Tensor) -> None:
        """Write columns back into a tensor: the inverse of ``columns``."""
        values = columns.flatten(0, 1)[: self.width]
        if not self.block:
            out.view(-1, self.width).copy_(values.T)
            return
        images, channels, height, width = self.shape
        side = self.block
        if self.rotated:
            values = _rotated(values.view(side * side, channels, -1).transpose(0, 1))
        squares = values.reshape(channels, side, side, images, height // side, width // side)
        out.view(images, channels, height // side, side, width // side, side).copy_(squares.permute(3, 0, 4, 1, 5, 2))


def rows_of(shape: Sequence[int], bits: float, chunks: int, more_bits: tuple[float, ...] = ()) -> Rows | None:
    """Return the rows of tensors of a shape, with ``chunks`` tensors a step; None if rows are too short."""
    shape = torch.Size(shape)
    # [N, C, H, W]; or [N, H, W, C], as some image models have it, if only that makes images square.
    is_image = len(shape) == 4 and not shape[1] == shape[2] != shape[3]
    if len(shape) < 2 or 0 in shape:
        return None
    block = 0
    if is_image:
        sides = [side for side in BLOCKS if shape[2] % side == shape[3] % side == 0]
        block = next((side for side in sides if shape[1] * side * side <= MAX_AXES), 1)
    width = Rows(shape, 1, 1, block).width
    if width < MIN_AXES:
        return None
    groups = -(-width // MAX_AXES)
    while True:
        chosen = Rows(shape, groups, -(-width // groups), block, more_bits)
        if chosen.every(bits, chunks) <= MAX_INTERVAL or chosen.size <= MIN_AXES:
            return chosen
        groups *= 2


def _rotated(squares: Tensor) -> Tensor:
    """Return the Hadamard transform of [channels, pixels, squares]; it is its own inverse."""
    matrix = _hadamard(squares.shape[1], squares.device).expand(len(squares), -1, -1)
    return torch.bmm(matrix, squares, out=torch.empty_like(squares, memory_format=torch.contiguous_format))


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal Hadamard matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(size)).to(device)
