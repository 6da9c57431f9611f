"""axes:B: PCA transform coding of rows, with bits allocated to the axes by variance (reverse water-filling).

This module encodes and decodes with a given basis; ``principal`` learns it, and ``thinpipe.links.learned.axes`` decides
when it is sent.

A tensor consists of rows of values that vary together: those of a token, or of a square of pixels in all channels. Wide
rows are split into groups with separate axes. With the mean m of all rows, axes V (the columns of a matrix, rounded to
8 bits, so its inverse is not its transpose), the deviation s of each axis and its number of bits, a row x is sent as

    z       (x - m) in the axes V, divided by s
    gain    the root of the mean of z^2 over axes with bits, at least max |z| / AXES_REACH; a bfloat16 for each row
    codes   of z / gain, axis by axis: the level of a normal distribution (``normal``) that is nearest

and decoded as V(gain * s * level) + m. The bits of all axes always have the same sum, B for each value on average.

The wire has the gains of all rows, then B bit planes for every value of a row: for each axis in turn the lowest bits
of all rows, the next bits, and so on. A plane has 8 pieces of ceil(rows / 8) rows; bit k of its byte i belongs to row i
of piece k. So a plane is written and read in full bytes, whatever the number of bits of other axes.

NaN or infinity in a row makes its gain non-finite, and all its decoded values too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.base import as_dtype, write_values
from thinpipe.codecs.kernels import Kernels, select
from thinpipe.codecs.normal import MAX_BITS, boundaries, levels

LEAST_BITS = 0.5
# A GPU multiplies bfloat16 seven times as fast as float32. Rounding rows and axes to it, at both ends, adds 2^-18 to
# the squared error; quantizing hidden states to this many bits per value loses a hundred times that.
ROUNDED_BITS = 4
MOST_AXES = 512  # of a group: their matrix has 256 kB, and its eigendecomposition takes a core 50 ms
LEAST_AXES = 16
BLOCKS = (8, 4, 2, 1)  # pixels: the sides that squares of an image may have

# Learned axes may take this share of a link's bytes. They become stale: if they would be sent less often than every
# FRESH steps, rows are split into more groups with fewer axes each. On hidden states and on pictures, more groups cost
# more accuracy than stale axes until these are FRESH steps old.
LEARNING_SHARE = 0.05
FRESH = 64
OFTEN = 5  # steps: on a GPU, about the time in which a core computes the axes of two links


@dataclass(frozen=True)
class Rows:
    """The layout of tensors of one shape as rows, and of rows as groups of axes."""

    shape: torch.Size
    groups: int
    size: int  # axes of a group
    block: int = 0  # side of the squares of pixels that are a row; 0: a row is the last dimension

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
    def learned_bytes(self) -> int:
        """The bytes of mean, deviations, axes and bits: see ``Basis``."""
        return sum(_sizes(self))

    def every(self, bits: float, chunks: int) -> int:
        """Return the interval between two learnings, in steps of ``chunks`` chunks."""
        return max(OFTEN, math.ceil(self.learned_bytes / (LEARNING_SHARE * chunks * self.wire_bytes(bits))))

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


def rows_of(shape: Sequence[int], bits: float, chunks: int) -> Rows | None:
    """Return the rows of tensors of a shape, with ``chunks`` tensors a step; None if rows are too short."""
    shape = torch.Size(shape)
    # [N, C, H, W]; or [N, H, W, C], as some image models have it, if only that makes images square.
    is_image = len(shape) == 4 and not shape[1] == shape[2] != shape[3]
    if len(shape) < 2 or 0 in shape:
        return None
    block = 0
    if is_image:
        sides = [side for side in BLOCKS if shape[2] % side == shape[3] % side == 0]
        block = next((side for side in sides if shape[1] * side * side <= MOST_AXES), 1)
    width = Rows(shape, 1, 1, block).width
    if width < LEAST_AXES:
        return None
    groups = -(-width // MOST_AXES)
    while True:
        chosen = Rows(shape, groups, -(-width // groups), block)
        if chosen.every(bits, chunks) <= FRESH or chosen.size <= LEAST_AXES:
            return chosen
        groups *= 2


@dataclass(frozen=True)
class Basis:
    """A learned basis as it is sent, and matrices derived from it. All vectors have groups * size entries."""

    bits: Tensor  # uint8
    starts: Tensor  # int64: the first plane of each axis
    share: Tensor  # the root of 1 / axes with bits
    mean: Tensor  # float32 [groups, values, 1]
    back: Tensor  # [groups, values, axes]: decoding matrix, from components in units of deviations to rows
    forth: Tensor | None  # [groups, axes, values]: encoding matrix, at a sender only

    @staticmethod
    def read(learned: Tensor, rows: Rows, bits: float, forth: Tensor | None = None) -> Basis:
        """Read a basis from untrusted bytes: mean and deviations, float32; axes, int8, rows of a matrix; bits.

        A deviation is that of the component times the unit of the int8 axis. ``forth``: given at a sender.
        """
        mean, deviation, axes, each = learned.split(_sizes(rows))
        mean, deviation = (as_dtype(part, torch.float32).view(rows.groups, rows.size, 1) for part in (mean, deviation))
        matrix = axes.view(torch.int8).view(rows.groups, rows.size, rows.size)
        dtype = torch.bfloat16 if learned.is_cuda and bits <= ROUNDED_BITS else torch.float32
        back = torch.empty_like(matrix, dtype=dtype)
        torch.mul(matrix, deviation, out=back.mT)
        each = each.clamp(max=MAX_BITS)
        has_bits = (each > 0).view(rows.groups, rows.size, 1)
        return Basis(
            bits=each,
            starts=each.cumsum(0) - each,
            share=has_bits.sum().clamp(min=1).rsqrt(),
            mean=mean,
            back=back,
            forth=None if forth is None else forth.to(dtype),
        )


def forth_of(learned: np.ndarray, rows: Rows, inverse: np.ndarray | None = None) -> np.ndarray:
    """Return the encoding matrix of a sender. It is computed on the CPU, where the axes are, and blocks no step.

    ``inverse``: of the int8 axes, if it is known; it is overwritten and returned.
    """
    _, deviation, axes, each = views(learned, rows)
    if inverse is None:
        inverse = np.linalg.inv(axes.swapaxes(1, 2).astype(np.float32))
    inverse *= np.where(each > 0, 1 / deviation, np.float32(0))
    return inverse


def views(learned: np.ndarray, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return writable views of mean, deviations, axes and bits of a basis, group by group."""
    mean, deviation, axes, each = np.split(learned, np.cumsum(_sizes(rows))[:-1])
    vector = rows.groups, rows.size, 1
    return (
        mean.view(np.float32).reshape(vector),
        deviation.view(np.float32).reshape(vector),
        axes.view(np.int8).reshape(rows.groups, rows.size, rows.size),
        each.reshape(vector),
    )


def _sizes(rows: Rows) -> list[int]:
    """Return the bytes of mean, deviations, axes and bits."""
    total = rows.groups * rows.size
    return [4 * total, 4 * total, total * rows.size, total]


def encode(columns: Tensor, basis: Basis, rows: Rows, wire: Tensor, kernels: str | Kernels = "auto") -> None:
    """Encode a tensor, in the layout of ``Rows.columns``, into a wire."""
    assert basis.forth is not None
    components = torch.empty_like(columns, memory_format=torch.contiguous_format)
    product(basis.forth, deviations(columns, basis.mean, basis.forth.dtype), components)
    used, end, z = _kernels(kernels, wire), 2 * rows.count, components.flatten(0, 1)
    gains = as_dtype(wire[:end], torch.bfloat16)
    used.find_gains(z, basis.share, gains)
    if gains.data_ptr() != wire.data_ptr():
        write_values(wire[:end], gains, torch.bfloat16)
    planes = wire[end:].view(-1, -(-rows.count // 8))
    limits = _table(boundaries, torch.inf, wire.device)
    used.encode_axes(z, gains, basis.bits, basis.starts, limits, planes)


def decode(wire: Tensor, basis: Basis, rows: Rows, out: Tensor, kernels: str | Kernels = "auto") -> None:
    """Decode a wire into a tensor; the wire has the right size but untrusted contents."""
    end = 2 * rows.count
    gains, planes = as_dtype(wire[:end], torch.bfloat16), wire[end:].view(-1, -(-rows.count // 8))
    z = torch.empty(rows.groups, rows.size, rows.count, dtype=basis.back.dtype, device=wire.device)
    values = _table(levels, 0.0, wire.device)
    _kernels(kernels, wire).decode_axes(planes, gains, basis.bits, basis.starts, values, z.flatten(0, 1))
    place = rows.view(out)
    columns = torch.empty_like(z, dtype=torch.float32) if place is None else place
    product(basis.back, z, columns).add_(basis.mean)
    if place is None:
        rows.restore(columns, out)


def deviations(columns: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Return columns minus the mean, rounded to ``dtype`` after the subtraction."""
    return torch.sub(columns, mean, out=torch.empty_like(columns, dtype=dtype))


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Multiply batches of matrices, accumulating in float32. Calls with ``out`` bypass the autocast of stages."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b, out=out)
    return torch.bmm(a, b, torch.float32, out=out)


def _kernels(chosen: str | Kernels, wire: Tensor) -> Kernels:
    return select(chosen, wire.device) if isinstance(chosen, str) else chosen


@cache
def _table(of: object, rest: float, device: torch.device) -> Tensor:
    """Return the quantizer levels or boundaries of a normal distribution for 0 to 8 bits, in padded rows."""
    assert of is levels or of is boundaries
    most = len(of(MAX_BITS))
    rows = [[*of(bits), *[rest] * (most - len(of(bits)))] for bits in range(MAX_BITS + 1)]
    return torch.tensor(rows, dtype=torch.float32, device=device)


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
