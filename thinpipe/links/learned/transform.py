"""axes:B: PCA transform coding of rows, with bits allocated to the axes by variance (reverse water-filling).

This module encodes and decodes with a given basis; ``learner`` learns it, and ``pca_codec`` decides when it is sent.

With the mean m of all rows, axes V (the columns of a matrix, rounded to 8 bits, so its inverse is not its transpose),
the deviation s of each axis and its number of bits, a row x (``row_layout``) is sent as

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

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.base import as_dtype, write_values
from thinpipe.codecs.kernels import Kernels, select
from thinpipe.codecs.normal import MAX_BITS, boundaries, levels
from thinpipe.links.learned.row_layout import Rows

MIN_BITS = 0.5
# A GPU multiplies bfloat16 seven times as fast as float32. Rounding rows and axes to it, at both ends, adds 2^-18 to
# the squared error; quantizing hidden states to this many bits per value loses a hundred times that.
ROUNDED_BITS = 4


@dataclass(frozen=True)
class Basis:
    """A PCA basis in use: matrices and tables derived from its bytes. All vectors have groups * size entries."""

    bits: Tensor  # uint8
    first_planes: Tensor  # int64: of each axis
    scale: Tensor  # the root of 1 / axes with bits
    mean: Tensor  # float32 [groups, values, 1]
    reconstruction: Tensor  # [groups, values, axes]: decodes components in units of deviations to rows
    projection: Tensor | None  # [groups, axes, values]: encodes rows, at a sender only

    @staticmethod
    def read(encoded: Tensor, rows: Rows, bits: float, projection: Tensor | None = None) -> Basis:
        """Read a basis from untrusted bytes: mean and deviations, float32; axes, int8, rows of a matrix; bits.

        A deviation is that of the component times the unit of the int8 axis. Of several allocations of bits, the one of
        ``bits`` per value is read. ``projection``: given at a sender.
        """
        mean, deviation, axes, allocations = encoded.split(rows.basis_parts)
        number = 1 + rows.more_bits.index(bits) if bits in rows.more_bits else 0
        each = allocations.view(-1, rows.groups * rows.size)[number]
        mean, deviation = (as_dtype(part, torch.float32).view(rows.groups, rows.size, 1) for part in (mean, deviation))
        matrix = axes.view(torch.int8).view(rows.groups, rows.size, rows.size)
        dtype = torch.bfloat16 if encoded.is_cuda and bits <= ROUNDED_BITS else torch.float32
        reconstruction = torch.empty_like(matrix, dtype=dtype)
        torch.mul(matrix, deviation, out=reconstruction.mT)
        each = each.clamp(max=MAX_BITS)
        has_bits = (each > 0).view(rows.groups, rows.size, 1)
        return Basis(
            bits=each,
            first_planes=each.cumsum(0) - each,
            scale=has_bits.sum().clamp(min=1).rsqrt(),
            mean=mean,
            reconstruction=reconstruction,
            projection=None if projection is None else projection.mul(has_bits).to(dtype),  # others are not in gains
        )


def projection_of(encoded: np.ndarray, rows: Rows, inverse: np.ndarray | None = None) -> np.ndarray:
    """Return the encoding matrix of a sender. It is computed on the CPU, where the axes are, and blocks no step.

    ``inverse``: of the int8 axes, if it is known; it is overwritten and returned.
    """
    _, deviation, axes, _ = basis_views(encoded, rows)
    if inverse is None:
        inverse = np.linalg.inv(axes.swapaxes(1, 2).astype(np.float32))
    inverse *= 1 / deviation
    return inverse


def basis_views(encoded: np.ndarray, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return writable views of mean, deviations, axes and bits of an encoded basis, group by group."""
    mean, deviation, axes, each = np.split(encoded, np.cumsum(rows.basis_parts)[:-1])
    vector = rows.groups, rows.size, 1
    return (
        mean.view(np.float32).reshape(vector),
        deviation.view(np.float32).reshape(vector),
        axes.view(np.int8).reshape(rows.groups, rows.size, rows.size),
        each.reshape(-1, *vector),  # of each allocation
    )


def encode(columns: Tensor, basis: Basis, rows: Rows, wire: Tensor, kernels: str | Kernels = "auto") -> None:
    """Encode a tensor, in the layout of ``Rows.columns``, into a wire."""
    assert basis.projection is not None
    components = torch.empty_like(columns, memory_format=torch.contiguous_format)
    product(basis.projection, deviations(columns, basis.mean, basis.projection.dtype), components)
    used, end, z = _kernels(kernels, wire), 2 * rows.count, components.flatten(0, 1)
    gains = as_dtype(wire[:end], torch.bfloat16)
    used.find_gains(z, basis.scale, gains)
    if gains.data_ptr() != wire.data_ptr():
        write_values(wire[:end], gains, torch.bfloat16)
    planes = wire[end:].view(-1, -(-rows.count // 8))
    limits = _table(boundaries, torch.inf, wire.device)
    used.encode_axes(z, gains, basis.bits, basis.first_planes, limits, planes)


def decode(wire: Tensor, basis: Basis, rows: Rows, out: Tensor, kernels: str | Kernels = "auto") -> None:
    """Decode a wire into a tensor; the wire has the right size but untrusted contents."""
    end = 2 * rows.count
    gains, planes = as_dtype(wire[:end], torch.bfloat16), wire[end:].view(-1, -(-rows.count // 8))
    z = torch.empty(rows.groups, rows.size, rows.count, dtype=basis.reconstruction.dtype, device=wire.device)
    values = _table(levels, 0.0, wire.device)
    _kernels(kernels, wire).decode_axes(planes, gains, basis.bits, basis.first_planes, values, z.flatten(0, 1))
    in_place = rows.view(out)
    columns = torch.empty_like(z, dtype=torch.float32) if in_place is None else in_place
    product(basis.reconstruction, z, columns).add_(basis.mean)
    if in_place is None:
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
