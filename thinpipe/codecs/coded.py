"""gauss:B+coded: blocks of 256 values on even steps, small values in fewer bits than large ones, B on average.

Levels for a normal distribution (``normal``) take as many bits for a value near zero, where most are, as for one far
out. Even steps, and a code that is the longer the rarer a value is, have two thirds of their error. Gradients of tokens
differ in size: all blocks share their bits, and those of more energy have more. Sizes stay known ahead: together blocks
have floor(8 B blocks) words of 32 bits, whatever the values.

    energy  of a block's components w, with p as in ``gauss``: the sum of w^2 / p^2, each rounded down to a multiple of
            2^-16, as a float32; of its image the 14 highest bits, as a number, and 64 for each power of two of p: so
            32 for each doubling of the energy. 0 where the scale is 0 or NaN
    size    of a block, in words: of ``sizes_by_energy`` the one at its energy, plus its index modulo 16, less a limit,
            the least with which all fit. The index makes a difference between blocks that are alike
    form    of a size: how many planes of low and of high bits of magnitudes, and words for the rest (``forms``)
    step    of the high bits, in units of p as in ``gauss``: s, the root of the mean square, times the form's step; at
            least a 16th of the largest component; then 2^(1/32) times as much until what is to be written fits
    m       |w| in steps of 2^-low of that, rounded down: its low bits, and M above them
    high    M, or all ones if M is no less: then M - high more are told, as so many ones and a zero
    value   (m + 1/2) steps, so scale is half a low step; with +unbiased as in ``gauss``, of 2 m + 1 for levels

The wire is the header of ``gauss``, then the size of every block, a byte each, padded to whole 16 bytes, then the words
of all blocks. A block begins with bit planes: of low bits, high bits, signs. A plane has 8 pieces of 32 values; bit k
of its byte i is of value i of piece k. Then the ones and zeros, lowest bits first: the first of all values that have
any, then the second of those whose first was a one, and so on. Sizes below 20 words have no such rest, and only as many
steps as their planes can tell.
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
WORDS_PER_BIT = CODED_BLOCK // 32
LARGEST_SIZE = 64
MOST_STEPS = 16  # of the high bits
TURNS = 16  # in which blocks that are alike differ
GROWTH = 2.0 ** (1 / 32)  # of a step, until what is to be written fits
HIGHEST_ENERGY = 21343
LIMITS = (-1024, 1 << 15)  # a limit is above the first and at most the second

# By size in words, up to one that has low bits: steps of the high bits, in root mean squares, and the error that is
# left of normal values, squared and over their square. Between 20 and 30 the steps are those with which blocks are
# seldom tried more than twice; sizes that are missing lose more than what others have on average.
_STEPS = {8: 1.596, 16: 1.992, 20: 0.841, 21: 0.738, 22: 0.655, 23: 0.595, 24: 0.545, 25: 0.5, 27: 0.411, 28: 0.373,
          29: 0.343, 30: 0.321}  # fmt: skip
_LOST = {8: 0.571, 16: 0.135, 20: 0.0615, 21: 0.0473, 22: 0.0375, 23: 0.0306, 24: 0.0255, 25: 0.0216, 27: 0.0145,
         28: 0.0119, 29: 0.0101, 30: 0.00867}  # fmt: skip
_FIRST_WITH_LOW_BITS = 32
_FIRST_WITH_REST = 20


class Form(NamedTuple):
    """How the values of a block are written."""

    low: int  # planes of the low bits of magnitudes
    high: int  # planes above them
    rest: int  # words for what these do not tell
    step: float  # of the high bits, in root mean squares of the block

    @property
    def planes(self) -> int:
        """Those of low bits, of high bits, and of signs."""
        return self.low + self.high + 1


@cache
def forms() -> dict[int, Form]:
    """Of each size that there is, from the smallest to the largest."""
    return {size: _form(size) for size in range(LARGEST_SIZE + 1) if _without_low_bits(size) in _STEPS}


@cache
def sizes_by_energy() -> tuple[int, ...]:
    """The size of a block by its energy above the limit, from 0 on; that of the last holds for all above.

    A word goes where it takes most error away: an energy at which the next size pays, by how much less is lost for each
    word more, is the less the smaller the size.
    """
    sizes = list(forms())
    gains = [(error_left(a) - error_left(b)) / (b - a) for a, b in itertools.pairwise(sizes)]
    pays = [round(-32 * math.log2(gain)) for gain in gains]
    first = pays[0] - 1
    return tuple(sizes[sum(each - first <= energy for each in pays)] for energy in range(pays[-1] - first + 1))


def sections(blocks: int, channels: int) -> tuple[int, int]:
    """Where the sizes of blocks start, and where their words do."""
    header = header_bytes(channels + blocks + GAUSS_SEED, 2)
    return header, header + header_bytes(blocks, 1)


def starts_of(sizes: Tensor) -> Tensor:
    """The first word of each block, int64."""
    return sizes.cumsum(0) - sizes


def allot(energies: Tensor, words: int) -> Tensor:
    """The size of every block, int32, at most so many words for all together. Nobody waits for a GPU."""
    table = size_table(energies.device).int()
    turned = energies + torch.arange(len(energies), dtype=torch.int32, device=energies.device) % TURNS
    low, high = (torch.tensor(each, dtype=torch.int32, device=energies.device) for each in LIMITS)

    def sizes(limit: Tensor) -> Tensor:
        return table[(turned - limit).clamp(0, len(table) - 1)]

    for _ in range((LIMITS[1] - LIMITS[0]).bit_length()):
        middle = (low + high) // 2
        fits = sizes(middle).sum() <= words
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return sizes(high)


def _without_low_bits(size: int) -> int:
    return size if size < _FIRST_WITH_LOW_BITS else (size - 24) % WORDS_PER_BIT + 24


def _form(size: int) -> Form:
    plain = _without_low_bits(size)
    if size < _FIRST_WITH_REST:
        return Form(size // WORDS_PER_BIT - 1, 0, 0, _STEPS[size])
    low, high = (size - plain) // WORDS_PER_BIT, 1 if plain <= 26 else 2
    return Form(low, high, plain - WORDS_PER_BIT * (high + 1), _STEPS[plain])


def error_left(size: int) -> float:
    """Of normal values, squared and over their square."""
    plain = _without_low_bits(size)
    return _LOST[plain] / 4.0 ** ((size - plain) // WORDS_PER_BIT)


@cache
def size_table(device: torch.device) -> Tensor:
    """``sizes_by_energy`` as bytes: four lines of a cache, of which threads of a GPU look at places of their own."""
    return torch.tensor(sizes_by_energy(), dtype=torch.uint8, device=device)


@cache
def form_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """By size: low, high and rest, int32; steps, float32."""
    numbers, steps = torch.zeros(LARGEST_SIZE + 1, 3, dtype=torch.int32), torch.ones(LARGEST_SIZE + 1)
    for size, form in forms().items():
        numbers[size], steps[size] = torch.tensor(form[:3], dtype=torch.int32), form.step
    return numbers.to(device), steps.to(device)


@cache
def known_sizes(device: torch.device) -> Tensor:
    """What a byte says of a block's size, on a damaged wire as well: the largest one there is that is not above it."""
    known = [max((size for size in forms() if size <= byte), default=min(forms())) for byte in range(256)]
    return torch.tensor(known, dtype=torch.int32, device=device)
