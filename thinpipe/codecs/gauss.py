"""gauss:B/T: rotated Lloyd-Max quantization of blocks of T values (centring, Hadamard transform, normal levels).

The rotation makes any values nearly normal, because every component is a sum of all of them. The optimal levels are
then known in advance (thinpipe.codecs.normal), and only the scale of a block is sent. Channel means are sent once.

The wire is the mean of every channel and the scale of every block, both bfloat16, and the seed of the signs, an int32,
padded to a multiple of 16 bytes; then the codes of all components as ``layout`` packs them. A short last block is
padded with zero values, and all of its codes are sent.

Channels are the last dimension; in tensors of four and more dimensions, which are images, the second. Means are sent
if a channel has at least 128 values, at most an eighth of a bit per value; otherwise they are 0. They are means of a
sample; more samples would gain nothing, because a mean need not be exact, only the same at both ends.

All arithmetic is float32, each operation is rounded by itself and none is fused, so all machines make the same bytes:

    mean    of K = min(N, 512) of the channel's N values: sample k is at position k * N // K. Strand s of 64 is the sum
            of samples s, s + 64, s + 128 ..., in this order; then the second half of the strands is added to the first
            until one is left, which is divided by K and rounded to the nearest bfloat16; 0 if that is not finite
    v       (x - mean) * sign, with the signs of ``layout.gauss_signs``, different for each block and seed; the seed is
            the low 32 bits of the message's key ^ the high 32 bits
    w       the Hadamard transform of the block: for h = 1, 2, 4 ... T/2 all pairs h apart become (a + b, a - b)
    p       the power of two with p <= the largest |w| < 2 p
    s       4 bits and more: (the largest |w| / p) * ``layout.gauss_reach``
            up to 3 bits: sqrt(the mean of all w^2 / p^2), each of them rounded down to a multiple of 2^-16
            rounded to the nearest bfloat16
    code    the number of boundaries between positive levels below |w * (1/p * (1/s))|; the highest bit is set if w < 0
            +unbiased: s is then the sum of w^2 / p^2, as above, over that of |w| / p * level, each rounded down to a
            multiple of 2^-16: the inner product of the decoded block with w is that of w with itself
    scale   s * p / T
    value   (the Hadamard transform of level * scale) * sign + mean

``coded`` describes the differences where blocks share a bit budget (``+coded``).

- A block with NaN or infinity, or whose transform reaches 2^126, has a scale of NaN and is decoded as NaN.
- A block whose components are all below 2^-100 has a scale of 0. The codes of both kinds are 0.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.codecs.base import KernelCodec
from thinpipe.codecs.golomb_rice import CODED_BLOCK, UNITS_PER_BIT, sections
from thinpipe.codecs.layout import GAUSS_SEED, header_bytes, packed_bytes
from thinpipe.codecs.normal import MAX_BITS
from thinpipe.codecs.tile import DEFAULT_TILE, check_tile

VALUES_PER_MEAN = 128
IMAGE_DIMENSIONS = 4


@dataclass(frozen=True)
class Gauss(KernelCodec):
    """A rotated Lloyd-Max quantizer: outliers are spread over their block, whose components are nearly normal.

    Levels of least squared error are too near to zero on average. Where errors should average out, as in gradients
    over a batch, ``unbiased`` corrects the scale for that. ``coded``: small values take fewer bits than large ones, and
    blocks share one bit budget by energy.
    """

    bits: float
    tile: int = DEFAULT_TILE
    unbiased: bool = False
    coded: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"{self.bits:g} bits are not from 1 to {MAX_BITS}")
        if not self.coded and self.bits != int(self.bits):
            raise ValueError(f"{self.bits:g} bits for each value are not an integer: fractions need +coded")
        if self.coded and self.tile != CODED_BLOCK:
            raise ValueError(f"+coded has blocks of {CODED_BLOCK} values, not of {self.tile}")
        check_tile(self.tile)

    @property
    def spec(self) -> str:
        bits, size = str(self.bits).removesuffix(".0"), f"/{self.tile}" if self.tile != DEFAULT_TILE else ""
        return f"gauss:{bits}{size}{'+coded' * self.coded}{'+unbiased' * self.unbiased}"

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        count, (channels, _) = math.prod(shape), channels_of(shape)
        blocks = -(-count // self.tile)
        if self.coded:
            return sections(blocks, channels)[1] + 4 * self._budget(count)
        return header_bytes(channels + blocks + GAUSS_SEED, 2) + packed_bytes(blocks * self.tile, int(self.bits))

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        seed = (key ^ key >> 32) & 0xFFFFFFFF
        used, rest = self.kernels_on(x.device), (*channels_of(x.shape), self.unbiased, seed)
        if self.coded:
            used.encode_coded(x, wire, self._budget(x.numel()), *rest)
        else:
            used.encode_gauss(x, wire, int(self.bits), self.tile, *rest)

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        used, rest = self.kernels_on(out.device), channels_of(out.shape)
        if self.coded:
            used.decode_coded(wire, out, self._budget(out.numel()), *rest)
        else:
            used.decode_gauss(wire, out, int(self.bits), self.tile, *rest)

    def _budget(self, count: int) -> int:
        """Return the 4-byte units that all blocks of ``count`` values share."""
        return math.floor(UNITS_PER_BIT * self.bits * -(-count // CODED_BLOCK))


def channels_of(shape: torch.Size) -> tuple[int, int]:
    """Return the number of channels with means and of neighbouring values per channel; (0, 1) if no means are sent."""
    image = len(shape) >= IMAGE_DIMENSIONS
    channels = shape[1 if image else -1] if shape else 1
    inner = math.prod(shape[2:]) if image else 1
    return (channels, inner) if math.prod(shape) >= VALUES_PER_MEAN * channels else (0, 1)
