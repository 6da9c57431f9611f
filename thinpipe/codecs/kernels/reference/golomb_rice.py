"""Reference kernels of ``gauss:B+coded`` in plain torch: the Golomb-Rice code of thinpipe.codecs.golomb_rice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thinpipe.codecs.golomb_rice import (
    CODED_BLOCK,
    GROWTH,
    LARGEST_SIZE,
    MOST_STEPS,
    Form,
    allot,
    form_table,
    forms,
    known_sizes,
    sections,
    starts_of,
)
from thinpipe.codecs.kernels.reference.lloyd_max import (
    Blocks,
    bfloat16_nearest,
    root_mean_squares,
    rotated,
    write_header,
    write_rows,
)
from thinpipe.codecs.layout import GAUSS_ENERGY


def encode_coded(x: Tensor, wire: Tensor, budget: int, channels: int, inner: int, unbiased: bool, seed: int) -> None:
    means, blocks = rotated(x, CODED_BLOCK, channels, inner, seed)
    sizes = allot(_energies(blocks), budget)
    magnitudes, half_step = _magnitudes(blocks, sizes)
    write_header(wire, means, _scales(blocks, magnitudes, half_step, unbiased), seed)
    first, second = sections(len(sizes), channels)
    wire[first:].zero_()
    wire[first : first + len(sizes)].copy_(sizes)
    payload = torch.zeros(budget + LARGEST_SIZE, 4, dtype=torch.uint8, device=wire.device)
    for form, which, at in _of_each_form(sizes):
        payload[at] = _encode_blocks(magnitudes[which], blocks.rows[which] < 0, form)
    wire[second:].copy_(payload[:budget].view(-1))


def decode_coded(wire: Tensor, out: Tensor, budget: int, channels: int, inner: int) -> None:
    count = -(-out.numel() // CODED_BLOCK)
    first, second = sections(count, channels)
    sizes = known_sizes(wire.device)[wire[first : first + count].int()]
    # On a damaged wire blocks may reach beyond its end: the missing bytes are read as zeros.
    payload = torch.nn.functional.pad(wire[second:].view(budget, 4), (0, 0, 0, LARGEST_SIZE))
    levels = torch.empty(count, CODED_BLOCK, device=wire.device)
    for form, which, at in _of_each_form(sizes):
        levels[which] = _decode_blocks(payload[at.clamp(max=len(payload) - 1)], form)
    write_rows(wire, out, levels, channels, inner)


def _energies(blocks: Blocks) -> Tensor:
    energies = blocks.squares.float().view(torch.int32) >> GAUSS_ENERGY
    energies += blocks.power.view(torch.int32) >> (GAUSS_ENERGY - 1)  # the power squared: its exponent twice
    return torch.where(blocks.usual, energies, 0)


def _of_each_form(sizes: Tensor) -> Iterator[tuple[Form, Tensor, Tensor]]:
    """Yield each form in use, the indices of its blocks, and the offsets of their 4-byte units, one row per block."""
    starts = starts_of(sizes)
    for size, form in forms().items():
        which = (sizes == size).nonzero().squeeze(1)
        if len(which):
            yield form, which, starts[which, None] + torch.arange(size, device=sizes.device)


def _magnitudes(blocks: Blocks, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return magnitudes in low steps, and half a low step, enlarged until the unary codes fit."""
    numbers, steps = form_table(sizes.device)
    low, high, rest = numbers[sizes].unbind(1)
    relative = blocks.largest / blocks.power
    step = root_mean_squares(blocks) * steps[sizes]
    step = torch.where(rest > 0, torch.maximum(step, relative * (1 / MOST_STEPS)), step)
    step = torch.where(blocks.usual, step, 1)
    most = (torch.where(rest > 0, MOST_STEPS, 1) << low) - 1
    while True:
        factor = 1 / blocks.power * (1 / step) * (1 << low)
        magnitudes = torch.minimum((blocks.rows.abs() * factor[:, None]).int(), most[:, None])
        more = (magnitudes >> low[:, None]) - (1 << high[:, None]) + 2  # bits of the unary code: ones and a zero
        over = (rest > 0) & (more.clamp(min=0).sum(1) > 32 * rest)
        if not over.any():
            return magnitudes, step / (2 << low)
        step = torch.where(over, step * GROWTH, step)


def _scales(blocks: Blocks, magnitudes: Tensor, half_step: Tensor, unbiased: bool) -> Tensor:
    if unbiased:
        components = blocks.rows.abs() * (2.0**8 / blocks.power)[:, None]
        products = (components * (2 * magnitudes + 1)).int().sum(1)
        half_step = blocks.squares.float() / products.float() * 2.0**-8
    half_step = torch.where(blocks.usual, bfloat16_nearest(half_step), 1)
    scale = half_step * (1 / CODED_BLOCK) * blocks.power
    return torch.where(blocks.usual, scale, torch.where(blocks.finite, 0, torch.nan))


def _encode_blocks(magnitudes: Tensor, negative: Tensor, form: Form) -> Tensor:
    """Encode blocks of one form to bytes [blocks, units, 4]."""
    escape = (1 << form.high) - 1
    above = magnitudes >> form.low
    codes = magnitudes & ((1 << form.low) - 1) | above.clamp(max=escape) << form.low
    codes |= negative.int() << (form.low + form.high)
    bits = [(codes >> bit & 1).unflatten(1, (8, -1)).transpose(1, 2).flatten(1) for bit in range(form.planes)]
    if form.rest:
        bits.append(_encode_rest(above - escape, 32 * form.rest))
    weights = 1 << torch.arange(8, device=codes.device)
    return (torch.cat(bits, 1).unflatten(1, (-1, 4, 8)) * weights).sum(3).to(torch.uint8)


def _encode_rest(more: Tensor, width: int) -> Tensor:
    """Return the unary codes (n ones and a zero) of values n >= 0, interleaved: all first bits, all second bits ..."""
    bits = torch.zeros(len(more), width + 1, dtype=torch.int32, device=more.device)
    written = torch.zeros_like(more[:, :1])
    for turn in range(MOST_STEPS):
        present = more >= turn
        place = written + present.cumsum(1) - 1
        bits.scatter_add_(1, torch.where(present, place, width).long(), (more > turn).int())
        written = written + present.sum(1, keepdim=True)
    return bits[:, :width]


def _decode_blocks(payload: Tensor, form: Form) -> Tensor:
    """Decode blocks of one form to levels in half low steps."""
    bits = (payload.int().flatten(1)[:, :, None] >> torch.arange(8, device=payload.device) & 1).flatten(1)
    planes = bits[:, : form.planes * CODED_BLOCK].unflatten(1, (form.planes, -1, 8)).transpose(2, 3).flatten(2)
    magnitudes = sum((planes[:, bit] << bit for bit in range(form.planes - 1)), torch.zeros_like(planes[:, 0]))
    if form.rest:
        magnitudes += _decode_rest(magnitudes >> form.low == (1 << form.high) - 1, bits, form) << form.low
    return (2 * magnitudes + 1) * (1.0 - 2 * planes[:, -1])


def _decode_rest(present: Tensor, bits: Tensor, form: Form) -> Tensor:
    """Decode the interleaved unary codes of ``_rest``. Bits beyond the end are zero."""
    payload = torch.nn.functional.pad(bits[:, form.planes * CODED_BLOCK :], (0, 1))
    more, read = torch.zeros_like(present, dtype=torch.int32), torch.zeros_like(bits[:, :1])
    for _ in range(MOST_STEPS):
        place = (read + present.cumsum(1) - 1).clamp(max=32 * form.rest)
        read = read + present.sum(1, keepdim=True)
        present = present & (payload.gather(1, place.clamp(min=0).long()) > 0)
        more += present
    return more
