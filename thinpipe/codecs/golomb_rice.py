"""gauss:B+coded: Golomb-Rice entropy coding of rotated blocks of 256 values, B bits per value on average.

Lloyd-Max levels for a normal distribution (``normal``) spend as many bits on a value near zero, where most are, as on
one far out. Uniform steps and a variable-length code, longer for rarer values, have two thirds of their error.
Gradients of different tokens differ in size: all blocks share one bit budget, and blocks of more energy get more of it.
The total size is known in advance: all blocks together have floor(8 B blocks) units of 4 bytes, for any values.

    energy  of a block's components w, with p as in ``gauss``: the sum of w^2 / p^2, each rounded down to a multiple of
            2^-16, as a float32; the energy is the 14 highest bits of its bit pattern, as an integer, plus 64 for each
            power of two of p: 32 for each doubling of the sum of squares. 0 where the scale is 0 or NaN
    size    of a block, in 4-byte units: the entry of ``sizes_by_energy`` at energy + block index modulo 16 - limit,
            with the smallest limit at which all blocks fit. The index breaks ties between blocks of equal energy
    form    of a size: the number of planes of low and of high bits of magnitudes, and of units of unary codes, the
            rest (``forms``)
    step    of the high bits, in units of p as in ``gauss``: s, the root mean square, times the form's step; with a
            rest at least a 16th of the largest component, and then multiplied by 2^(1/32) until the unary codes fit
    m       |w| in units of 2^-low steps, rounded down: low bits, and M above them
    high    min(M, escape), where escape is all ones; from escape on, M - escape follows as a unary code (n ones and a
            zero)
    value   (m + 1/2) low steps, so scale is half a low step; +unbiased as in ``gauss``, with 2 m + 1 for the level

The wire is the header of ``gauss``; the size of every block, one byte each, padded to a multiple of 16 bytes; then the
units of all blocks. A block begins with bit planes: low bits, high bits, signs. A plane has 8 pieces of 32 values; bit
k of its byte i belongs to value i of piece k. The unary codes follow, interleaved, lowest bits first: the first bit of
every value that has a code, then the second bit of those whose first bit was one, and so on. Sizes below 20 units have
no unary codes; their magnitudes are clipped to what the planes can hold.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.codecs.layout import GAUSS_SEED, header_bytes

CODED_BLOCK = 256
UNITS_PER_BIT = CODED_BLOCK // 32
LARGEST_SIZE = 64
MOST_STEPS = 16  # of the high bits, in forms with a rest, in forms with a rest
TURNS = 16  # the block index modulo this breaks ties between blocks of equal energy
GROWTH = 2.0 ** (1 / 32)  # factor of a step until the unary codes fit
HIGHEST_ENERGY = 21343
LIMITS = (-1024, 1 << 15)  # a limit is above the first and not above the second

# By size in 4-byte units, for sizes without low bits: the step of the high bits in root mean squares, and the relative
# squared error on normal values. Between 20 and 30 the steps are chosen so that a block is seldom tried more than
# twice; missing sizes have more error than a mix of their neighbours of the same average size.
_STEPS = {8: 1.596, 16: 1.992, 20: 0.841, 21: 0.738, 22: 0.655, 23: 0.595, 24: 0.545, 25: 0.5, 27: 0.411, 28: 0.373,
          29: 0.343, 30: 0.321}  # fmt: skip
_LOST = {8: 0.571, 16: 0.135, 20: 0.0615, 21: 0.0473, 22: 0.0375, 23: 0.0306, 24: 0.0255, 25: 0.0216, 27: 0.0145,
         28: 0.0119, 29: 0.0101, 30: 0.00867}  # fmt: skip
_FIRST_WITH_LOW_BITS = 32
_FIRST_WITH_REST = 20


class Form(NamedTuple):
    """The layout of a block of one size."""

    low: int  # planes of the low bits of magnitudes
    high: int  # planes above them
    rest: int  # 4-byte units of unary codes
    step: float  # of the high bits, in root mean squares of the block

    @property
    def planes(self) -> int:
        """The number of bit planes: low bits, high bits and signs."""
        return self.low + self.high + 1


@cache
def forms() -> dict[int, Form]:
    """Return the form of every size in use, from the smallest to the largest."""
    return {size: _form(size) for size in range(LARGEST_SIZE + 1) if _without_low_bits(size) in _STEPS}


@cache
def sizes_by_energy() -> tuple[int, ...]:
    """Return the size of a block by its energy above the limit, from 0 on; the last entry holds for all above.

    Greedy bit allocation: each 4-byte unit goes where it reduces the error most. The energy at which the next size
    pays follows from the error it saves per additional unit, and rises with the size.
    """
    sizes = list(forms())
    gains = [(error_left(a) - error_left(b)) / (b - a) for a, b in itertools.pairwise(sizes)]
    pays = [round(-32 * math.log2(gain)) for gain in gains]
    first = pays[0] - 1
    return tuple(sizes[sum(each - first <= energy for each in pays)] for energy in range(pays[-1] - first + 1))


def sections(blocks: int, channels: int) -> tuple[int, int]:
    """Return the wire offsets at which the sizes of the blocks start, and their contents."""
    header = header_bytes(channels + blocks + GAUSS_SEED, 2)
    return header, header + header_bytes(blocks, 1)


def starts_of(sizes: Tensor) -> Tensor:
    """Return the offset of each block, in 4-byte units, int64."""
    return sizes.cumsum(0) - sizes


def allot(energies: Tensor, budget: int) -> Tensor:
    """Return the size of every block, int32, ``budget`` in total at most. Does not synchronize with the device."""
    table = size_table(energies.device).int()
    turned = energies + torch.arange(len(energies), dtype=torch.int32, device=energies.device) % TURNS
    low, high = (torch.tensor(each, dtype=torch.int32, device=energies.device) for each in LIMITS)

    def sizes(limit: Tensor) -> Tensor:
        return table[(turned - limit).clamp(0, len(table) - 1)]

    for _ in range((LIMITS[1] - LIMITS[0]).bit_length()):
        middle = (low + high) // 2
        fits = sizes(middle).sum() <= budget
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return sizes(high)


def _without_low_bits(size: int) -> int:
    return size if size < _FIRST_WITH_LOW_BITS else (size - 24) % UNITS_PER_BIT + 24


def _form(size: int) -> Form:
    plain = _without_low_bits(size)
    if size < _FIRST_WITH_REST:
        return Form(size // UNITS_PER_BIT - 1, 0, 0, _STEPS[size])
    low, high = (size - plain) // UNITS_PER_BIT, 1 if plain <= 26 else 2
    return Form(low, high, plain - UNITS_PER_BIT * (high + 1), _STEPS[plain])


def error_left(size: int) -> float:
    """Return the relative squared error of a size on normal values."""
    plain = _without_low_bits(size)
    return _LOST[plain] / 4.0 ** ((size - plain) // UNITS_PER_BIT)


@cache
def size_table(device: torch.device) -> Tensor:
    """Return ``sizes_by_energy`` as bytes: four cache lines, in which each GPU thread looks up its own entry."""
    return torch.tensor(sizes_by_energy(), dtype=torch.uint8, device=device)


@cache
def form_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two tables by size: low, high and rest as int32, and steps as float32."""
    numbers, steps = torch.zeros(LARGEST_SIZE + 1, 3, dtype=torch.int32), torch.ones(LARGEST_SIZE + 1)
    for size, form in forms().items():
        numbers[size], steps[size] = torch.tensor(form[:3], dtype=torch.int32), form.step
    return numbers.to(device), steps.to(device)


@cache
def known_sizes(device: torch.device) -> Tensor:
    """Return the block size for every byte value, rounded down to a valid size, so that damaged wires decode."""
    known = [max((size for size in forms() if size <= byte), default=min(forms())) for byte in range(256)]
    return torch.tensor(known, dtype=torch.int32, device=device)
