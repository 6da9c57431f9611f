"""gauss:B/T+adaptive: more bits for blocks of more energy, B for each value on average.

Gradients of tokens differ in size. A bit takes the more error away the more energy a block has, and the less the more
bits it has already (``normal.distortion``): each bit goes where it takes away most. Sizes stay known ahead: all blocks
together have floor(B * blocks) bits for each place, whatever the values.

    energy  of a block's components w, with p as in ``gauss``: the sum of w^2 / p^2, each rounded down to a multiple of
            2^-16, as a float32; of its image the 14 highest bits, as a number, and 64 for each power of two of p: so
            32 for each doubling of the energy. 0 where the scale is 0 or NaN
    bits    every block has one. Of all others, the second to the eighth of each block, those are there whose energy and
            ``worth`` together are largest; of equal ones those of the first blocks

A block is then coded as gauss has it with so many bits.

The wire is the header of ``gauss``, then the bits of every block, a byte each, padded to whole 16 bytes, then the bit
planes of all blocks, lowest bits first. A plane has 8 pieces of T/8 values; bit k of its byte i is of value i of piece
k.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from thinpipe.codecs.layout import GAUSS_ENERGY, GAUSS_SEED, header_bytes
from thinpipe.codecs.normal import MAX_BITS, distortion, magnitude_boundaries, signed_levels

PER_DOUBLING = 1 << (23 - GAUSS_ENERGY)  # of an energy


@cache
def worth(unbiased: bool) -> tuple[int, ...]:
    """What the second to the eighth bit of a block take away of its energy, in the units of that."""

    def lost(bits: int) -> float:
        share = distortion(bits)
        return share / (1 - share) if unbiased else share

    return tuple(round(PER_DOUBLING * math.log2(lost(bits - 1) - lost(bits))) for bits in range(2, MAX_BITS + 1))


def sections(blocks: int, channels: int) -> tuple[int, int]:
    """Where the bits of blocks start, and where the planes do."""
    header = header_bytes(channels + blocks + GAUSS_SEED, 2)
    return header, header + header_bytes(blocks, 1)


def allot(energies: Tensor, planes: int, unbiased: bool) -> Tensor:
    """The bits of every block, uint8, so many for all together. Nobody waits for a GPU."""
    gains = energies[:, None] + _worth_on(energies.device, unbiased)
    chosen = gains.flatten().sort(descending=True, stable=True).indices[: planes - len(energies)] // gains.shape[1]
    return torch.ones_like(energies).index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32)).to(torch.uint8)


@cache
def _worth_on(device: torch.device, unbiased: bool) -> Tensor:
    return torch.tensor(worth(unbiased), dtype=torch.int32, device=device)


def starts_of(bits: Tensor) -> Tensor:
    """The first plane of each block, int64."""
    return bits.cumsum(0) - bits


@cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """For 0 to 8 bits, a row each: boundaries between positive levels, then infinity; levels by their code, then 0."""
    boundaries = torch.full((MAX_BITS + 1, 1 << (MAX_BITS - 1)), torch.inf)
    levels = torch.zeros(MAX_BITS + 1, 1 << MAX_BITS)
    for bits in range(1, MAX_BITS + 1):
        edges, values = magnitude_boundaries(bits), signed_levels(bits)
        boundaries[bits, : len(edges)], levels[bits, : len(values)] = torch.tensor(edges), torch.tensor(values)
    return boundaries.to(device), levels.to(device)
