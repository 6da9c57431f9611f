"""axes:B: rows of values in the directions in which they vary, each direction with as many bits as it deserves.

Here is what both ends of a link do with axes that they have; ``principal`` says where those come from, and
``thinpipe.links.learned.axes`` when they travel.

A tensor is rows of values that vary together: a token's, or those of a square of pixels in all channels. Wide rows fall
into groups that have axes of their own. With the mean m of all rows, axes V (the columns of a matrix, rounded to 8
bits, which is why its inverse is not its transpose), the deviation s of each axis and its number of bits, a row x
travels as

    z       (x - m) in the axes V, divided by s
    gain    the root of the mean of z^2 over axes with bits, at least max |z| / AXES_REACH; a bfloat16 for each row
    codes   of z / gain, axis by axis: the level of a normal distribution (``normal``) that is nearest

and comes back as V(gain * s * level) + m. Bits of all axes sum to the same whatever was learned, B for each value.

The wire has the gains of all rows, then B bit planes for every value of a row: for each axis in turn its lowest bits
of all rows, the next ones, and so on. A plane has 8 pieces of ceil(rows / 8) rows; bit k of its byte i is of row i of
piece k. So a plane is written and read by whole bytes, whatever the bits of its neighbours.

NaN or infinity in a row is in its gain, and nothing of it comes back finite.
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
# the squared error; so many bits for each value of hidden states lose a hundred times that.
ROUNDED_BITS = 4
MOST_AXES = 512  # of a group: their matrix is 256 kB, and takes a core 50 ms to find
LEAST_AXES = 16
BLOCKS = (8, 4, 2, 1)  # pixels: the sides that squares of an image may have

# Learned axes may take this part of a link's bytes. They age: where that would let them travel more rarely than every
# FRESH steps, rows fall into more groups, with fewer axes each. That costs more than age does, on hidden states and on
# pictures, until they are this old.
LEARNING_SHARE = 0.05
FRESH = 64
OFTEN = 5  # steps: on a GPU, about the time in which a core finds the axes of two links


@dataclass(frozen=True)
class Rows:
    """How tensors of a shape are rows, and how these fall into groups."""

    shape: torch.Size
    groups: int
    size: int  # axes of a group
    block: int = 0  # side of the squares of pixels that are a row; 0: a row is the last dimension

    @property
    def rotated(self) -> bool:
        """Whether squares go through a Hadamard transform, so that what varies together is in one group."""
        return self.block > 1 and self.groups > 1

    @cached_property
    def width(self) -> int:
        """Values in a row."""
        return self.shape[1] * self.block**2 if self.block else self.shape[-1]

    @cached_property
    def count(self) -> int:
        return math.prod(self.shape) // self.width

    @property
    def key(self) -> tuple[int, ...]:
        """What tensors have in common that can have the same axes."""
        return self.width, self.groups, self.size, self.block

    def planes(self, bits: float) -> int:
        """Bits of a row."""
        return math.floor(bits * self.width)

    def wire_bytes(self, bits: float) -> int:
        return 2 * self.count + self.planes(bits) * -(-self.count // 8)

    @property
    def learned_bytes(self) -> int:
        """Of mean, deviation, axes and bits: see ``Basis``."""
        return sum(_sizes(self))

    def every(self, bits: float, chunks: int) -> int:
        """Steps of so many chunks from one learning to the next."""
        return max(OFTEN, math.ceil(self.learned_bytes / (LEARNING_SHARE * chunks * self.wire_bytes(bits))))

    def columns(self, x: Tensor) -> Tensor:
        """A tensor as float32 [groups, size, count], of which each column is a row of it; the last may end in zeros."""
        if self.block:
            images, channels, height, width = self.shape
            side = self.block
            squares = x.reshape(images, channels, height // side, side, width // side, side).permute(1, 3, 5, 0, 2, 4)
            values = squares.reshape(channels, side * side, -1).float()
            if self.rotated:
                values = _rotated(values).transpose(0, 1)  # its coefficients one by one
            values = values.reshape(self.width, -1)
        else:
            values = x.reshape(-1, self.width).float().T
        missing = self.groups * self.size - self.width
        if missing:
            values = torch.nn.functional.pad(values, (0, 0, 0, missing))
        return values.unflatten(0, (self.groups, self.size))

    def view(self, out: Tensor) -> Tensor | None:
        """A tensor as ``columns`` has it, where that takes no copy."""
        if self.block or out.dtype != torch.float32 or self.groups * self.size != self.width or not out.is_contiguous():
            return None
        return out.view(-1, self.groups, self.size).permute(1, 2, 0)

    def restore(self, columns: Tensor, out: Tensor) -> None:
        """The inverse of ``columns``."""
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
    """The rows of tensors of a shape, so many a step; None where there are none to speak of."""
    shape = torch.Size(shape)
    # [N, C, H, W]; but [N, H, W, C], as some models of images have it, where that alone makes images square.
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
    """What was learned, as it travels, and what follows from that. All vectors have groups * size entries."""

    bits: Tensor  # uint8
    starts: Tensor  # int64: the first plane of each axis
    share: Tensor  # the root of 1 / axes with bits
    mean: Tensor  # float32 [groups, values, 1]
    back: Tensor  # [groups, values, axes]: from components, in deviations, to rows
    forth: Tensor | None  # [groups, axes, values], of a sender

    @staticmethod
    def read(learned: Tensor, rows: Rows, bits: float, forth: Tensor | None = None) -> Basis:
        """From bytes that may be anything: mean and deviations, float32; axes, int8, rows of a matrix; bits.

        A deviation is that of the component times what makes an axis of the int8. ``forth``: of a sender.
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
    """What a sender multiplies rows with. Found where axes are, on the CPU: no GPU and no step waits for it.

    ``inverse``: of the axes as they travel, by who has it; it becomes what is returned.
    """
    _, deviation, axes, each = views(learned, rows)
    if inverse is None:
        inverse = np.linalg.inv(axes.swapaxes(1, 2).astype(np.float32))
    inverse *= np.where(each > 0, 1 / deviation, np.float32(0))
    return inverse


def views(learned: np.ndarray, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, deviations, axes and bits, group by group: the bytes themselves, to be read or filled in."""
    mean, deviation, axes, each = np.split(learned, np.cumsum(_sizes(rows))[:-1])
    vector = rows.groups, rows.size, 1
    return (
        mean.view(np.float32).reshape(vector),
        deviation.view(np.float32).reshape(vector),
        axes.view(np.int8).reshape(rows.groups, rows.size, rows.size),
        each.reshape(vector),
    )


def _sizes(rows: Rows) -> list[int]:
    """Bytes of mean, deviations, axes and bits."""
    total = rows.groups * rows.size
    return [4 * total, 4 * total, total * rows.size, total]


def encode(columns: Tensor, basis: Basis, rows: Rows, wire: Tensor, kernels: str | Kernels = "auto") -> None:
    """Fill a wire from what ``Rows.columns`` made of a tensor."""
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
    """Fill a tensor from its wire, of the right size but with any contents."""
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
    """From a mean, and only then rounded."""
    return torch.sub(columns, mean, out=torch.empty_like(columns, dtype=dtype))


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Of matrices, summed in float32. Nothing with ``out`` goes through autocast, in which stages compute."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b, out=out)
    return torch.bmm(a, b, torch.float32, out=out)


def _kernels(chosen: str | Kernels, wire: Tensor) -> Kernels:
    return select(chosen, wire.device) if isinstance(chosen, str) else chosen


@cache
def _table(of: object, rest: float, device: torch.device) -> Tensor:
    """Levels or boundaries of a normal distribution for 0 to 8 bits, a row each, filled up."""
    assert of is levels or of is boundaries
    most = len(of(MAX_BITS))
    rows = [[*of(bits), *[rest] * (most - len(of(bits)))] for bits in range(MAX_BITS + 1)]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def _rotated(squares: Tensor) -> Tensor:
    """[channels, pixels, squares] through a Hadamard transform, which is its own inverse."""
    matrix = _hadamard(squares.shape[1], squares.device).expand(len(squares), -1, -1)
    return torch.bmm(matrix, squares, out=torch.empty_like(squares, memory_format=torch.contiguous_format))


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """The orthonormal one."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(size)).to(device)
