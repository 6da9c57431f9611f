"""tile:B/T: block-wise min-max quantization: a minimum and a step per T consecutive values, B bits per value.

The wire is 4 bytes per tile, then the codes of all values as ``layout`` packs them. The last tile may be short. The
two bytes ``step`` of all tiles come first, then two more bytes of all tiles: ``low``, or with ``+zero`` the zero point
``point``, the code of 0. Step and low are bfloat16, not float16: gradients of a mean are often below 6e-8, where
float16 ends, and those of a scaled loss above 65504. point is an int16.

All arithmetic is float32, each operation is rounded by itself and none is fused, so all machines make the same bytes.

    top = 2^B - 1;  lo, hi = the least and the greatest value of the tile, -0 counted as 0
    low     the largest bfloat16 that is not above lo
    step    (hi - low) / top rounded up to a bfloat16, the next one if low + top * step < hi; 0 if low reaches hi
    t       (x - low) * (1 / step), clamped to 0 .. top; 0 where step is 0
    code    floor(t + 0.5), at most top
    value   low + code * step

With ``+zero``, lo is at most 0 and hi at least 0:

    point   -lo / (hi - lo) * top rounded to even, at least 1 if lo < 0, at most top - 1 if hi > 0
    step    the larger of -lo / point and hi / (top - point) rounded up to a bfloat16, the next one if that is too small
    t       x * (1 / step) + point, clamped to 0 .. top
    value   (code - point) * step

- Steps other than 0 are at least 2^-126. Step and low are clamped to the largest finite bfloat16.
- Where |lo| or |hi| reaches 2^112, all of this is done on values times 2^-12, which is exact and cannot overflow. Where
  |low| or step does, the value is computed from both times 2^-12, then multiplied by 2^12 and clamped to finite values.
- A tile with NaN or infinity has a step and a low of NaN and a point of 0, and is decoded as NaN. Its codes are 0.
- ``+sr`` is stochastic rounding: code = floor(t) + (1 if u < t - floor(t) else 0), with u drawn as in ``rounding`` for
  the value's position in the tensor. The expected code is t; an integer t is kept, and so are zeros under +zero.
- ``+rot`` pads the tensor with zeros to a multiple of T, sends all of them, and replaces each tile by its Hadamard
  transform: for h = 1, 2, 4 ... T/2 all pairs h apart become (a + b, a - b), and at the end all values are multiplied
  by T^-0.5. The decoder applies the same transform to the decoded values.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.codecs.base import KernelCodec
from thinpipe.codecs.layout import packed_bytes

DEFAULT_TILE = 256
LEAST_TILE, LARGEST_TILE = 16, 4096


def check_tile(tile: int) -> None:
    if not LEAST_TILE <= tile <= LARGEST_TILE or tile & (tile - 1):
        raise ValueError(f"a tile of {tile} values is not a power of two from {LEAST_TILE} to {LARGEST_TILE}")


@dataclass(frozen=True)
class Tile(KernelCodec):
    """A block-wise min-max quantizer: an outlier affects the step of its own tile only."""

    bits: int
    tile: int = DEFAULT_TILE
    rot: bool = False
    sr: bool = False
    zero: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"{self.bits} bits are not from 1 to 8")
        check_tile(self.tile)
        if self.zero and self.bits == 1:
            raise ValueError("+zero needs 2 bits or more: of 2 levels none is left for zero between both signs")
        if self.zero and self.rot:
            raise ValueError("+rot and +zero exclude each other: zero of a rotated tile is not zero of its values")

    @property
    def spec(self) -> str:
        size = "" if self.tile == DEFAULT_TILE else f"/{self.tile}"
        options = "".join(f"+{name}" for name in ("rot", "sr", "zero") if getattr(self, name))
        return f"tile:{self.bits}{size}{options}"

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        count = math.prod(shape)
        tiles = -(-count // self.tile)
        return 4 * tiles + packed_bytes(tiles * self.tile if self.rot else count, self.bits)

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        kernels = self.kernels_on(x.device)
        kernels.encode_tile(x, wire, self.bits, self.tile, self.rot, self.sr, self.zero, key)

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        self.kernels_on(out.device).decode_tile(wire, out, self.bits, self.tile, self.rot, self.zero)
