"""CPU kernels of ``gauss:B+coded``: channel means first, then energies, block sizes, and the coded blocks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.coded import CODED_BLOCK, form_table, known_sizes, sections, size_table
from thinpipe.codecs.kernels.cpu.arrays import array_of, tile_shares
from thinpipe.codecs.kernels.cpu.gauss import means_of_channels, read_header, spread_means, write_header
from thinpipe.codecs.kernels.cpu.loops.coded import allot, decode_coded_blocks, encode_coded_blocks, find_energies
from thinpipe.codecs.kernels.cpu.loops.gauss import UNIT
from thinpipe.codecs.kernels.cpu.threads import parallel

_CPU = torch.device("cpu")


def encode_coded(x: Tensor, wire: Tensor, words: int, channels: int, inner: int, unbiased: bool, seed: int) -> None:
    values, blocks = array_of(x), -(-x.numel() // CODED_BLOCK)
    means = means_of_channels(values, channels, inner)
    spread, run = spread_means(means, inner)
    energies, sizes, scales = np.empty(blocks, np.int32), np.empty(blocks, np.int32), np.empty(blocks, np.uint16)
    parallel(
        lambda first, last: find_energies(values, spread, energies, first, last, run, seed),
        tile_shares(values.size, UNIT),
    )
    allot(energies, size_table(_CPU).numpy(), words, sizes)
    header, told_sizes, told = np.split(wire.numpy(), sections(blocks, channels))
    told_sizes[:blocks], told_sizes[blocks:] = sizes, 0
    starts = _starts(sizes)
    told[4 * starts[-1] :] = 0
    forms, steps = (each.numpy() for each in form_table(_CPU))
    parallel(
        lambda first, last: encode_coded_blocks(
            values, spread, scales, starts, told, first, last, run, forms, steps, unbiased, seed
        ),
        tile_shares(values.size, UNIT),
    )
    write_header(header, means, scales, seed)


def decode_coded(wire: Tensor, out: Tensor, words: int, channels: int, inner: int) -> None:
    values, blocks = array_of(out), -(-out.numel() // CODED_BLOCK)
    header, told_sizes, told = np.split(wire.numpy(), sections(blocks, channels))
    means, scales, seed = read_header(header, channels, blocks)
    starts = _starts(known_sizes(_CPU).numpy()[told_sizes[:blocks]])
    forms = form_table(_CPU)[0].numpy()
    spread, run = spread_means(means, inner)
    parallel(
        lambda first, last: decode_coded_blocks(told, scales, starts, spread, values, first, last, run, forms, seed),
        tile_shares(values.size, UNIT),
    )


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Return the offset of each block in 32-bit units, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
