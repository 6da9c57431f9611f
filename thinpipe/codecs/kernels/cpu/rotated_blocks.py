"""CPU kernels of ``gauss`` and ``gauss:B+coded``: channel means first, then blocks, then the header."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.golomb_rice import CODED_BLOCK, form_table, known_sizes, sections, size_table
from thinpipe.codecs.kernels.cpu.loops.lloyd_max import UNIT, channel_means, decode_blocks, encode_blocks
from thinpipe.codecs.kernels.cpu.loops.rice_code import allot, decode_coded_blocks, encode_coded_blocks, find_energies
from thinpipe.codecs.kernels.cpu.threads import GRAIN, array_of, parallel, split, tile_shares
from thinpipe.codecs.layout import BLOCK, GAUSS_SAMPLES, GAUSS_SEED, gauss_reach, header_bytes
from thinpipe.codecs.normal import magnitude_boundaries, signed_levels

_CPU = torch.device("cpu")
_RUN = 64  # from this many neighbouring values per channel each run of them is a loop of its own


def encode_gauss(
    x: Tensor, wire: Tensor, bits: int, tile: int, channels: int, inner: int, unbiased: bool, seed: int
) -> None:
    values, scales = array_of(x), np.empty(-(-x.numel() // tile), np.uint16)
    means = _means_of_channels(values, channels, inner)
    header, codes = np.split(wire.numpy(), [header_bytes(channels + scales.size + GAUSS_SEED, 2)])
    reach, thresholds = np.float32(gauss_reach(tile)), np.array(magnitude_boundaries(bits), np.float32)
    levels = np.array(signed_levels(bits)[: 1 << (bits - 1)] if unbiased else (), np.float32)
    spread, run = _spread_means(-means, inner)
    parallel(
        lambda first, last: encode_blocks(
            values, spread, scales, codes, first, last, tile, run, thresholds, levels, reach, seed
        ),
        tile_shares(values.size, UNIT),
    )
    _write_header(header, means, scales, seed)


def decode_gauss(wire: Tensor, out: Tensor, bits: int, tile: int, channels: int, inner: int) -> None:
    values, blocks = array_of(out), -(-out.numel() // tile)
    header, codes = np.split(wire.numpy(), [header_bytes(channels + blocks + GAUSS_SEED, 2)])
    means, scales, seed = _read_header(header, channels, blocks)
    levels = np.array(signed_levels(bits), np.float32)
    spread, run = _spread_means(means, inner)
    parallel(
        lambda first, last: decode_blocks(codes, scales, spread, values, first, last, bits, tile, run, levels, seed),
        tile_shares(values.size, UNIT),
    )


def encode_coded(x: Tensor, wire: Tensor, budget: int, channels: int, inner: int, unbiased: bool, seed: int) -> None:
    values, blocks = array_of(x), -(-x.numel() // CODED_BLOCK)
    means = _means_of_channels(values, channels, inner)
    spread, run = _spread_means(-means, inner)
    found, sizes, scales = np.empty((3, blocks), np.int32), np.empty(blocks, np.int32), np.empty(blocks, np.uint16)
    parallel(
        lambda first, last: find_energies(values, spread, found, first, last, run, seed),
        tile_shares(values.size, UNIT),
    )
    allot(found[0], size_table(_CPU).numpy(), budget, sizes)
    header, size_bytes, payload = np.split(wire.numpy(), sections(blocks, channels))
    size_bytes[:blocks], size_bytes[blocks:] = sizes, 0
    starts = _starts(sizes)
    payload[4 * starts[-1] :] = 0
    numbers, steps = (each.numpy() for each in form_table(_CPU))
    forms = np.column_stack([numbers, steps.view(np.int32)])
    parallel(
        lambda first, last: encode_coded_blocks(
            values, spread, found, scales, starts, payload, first, last, run, forms, unbiased, seed
        ),
        tile_shares(values.size, UNIT),
    )
    _write_header(header, means, scales, seed)


def decode_coded(wire: Tensor, out: Tensor, budget: int, channels: int, inner: int) -> None:
    values, blocks = array_of(out), -(-out.numel() // CODED_BLOCK)
    header, size_bytes, payload = np.split(wire.numpy(), sections(blocks, channels))
    means, scales, seed = _read_header(header, channels, blocks)
    starts = _starts(known_sizes(_CPU).numpy()[size_bytes[:blocks]])
    forms = form_table(_CPU)[0].numpy()
    spread, run = _spread_means(means, inner)
    parallel(
        lambda first, last: decode_coded_blocks(payload, scales, starts, spread, values, first, last, run, forms, seed),
        tile_shares(values.size, UNIT),
    )


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Return the offset of each block in 4-byte units, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _means_of_channels(values: np.ndarray, channels: int, inner: int) -> np.ndarray:
    means = np.zeros(channels, np.float32)
    if channels:
        of_each = values.size // channels
        sample = np.arange(min(of_each, GAUSS_SAMPLES)) * of_each // min(of_each, GAUSS_SAMPLES)
        places = sample // inner * (channels * inner) + sample % inner
        parallel(
            lambda first, last: channel_means(values, means, places, first, last, inner),
            split(channels, -(-GRAIN * BLOCK // places.size)),
        )
    return means


def _spread_means(means: np.ndarray, inner: int) -> tuple[np.ndarray, int]:
    """Return means and inner size for the loops: means of short runs are repeated per value, plus one unit."""
    if inner >= _RUN:
        return means, inner
    every = np.repeat(means, inner) if means.size else np.zeros(1, np.float32)
    return every[np.arange(every.size + UNIT) % every.size], 1


def _write_header(header: np.ndarray, means: np.ndarray, scales: np.ndarray, seed: int) -> None:
    seed_bits = np.array([seed & 0xFFFF, seed >> 16], np.uint16)
    written = np.concatenate([(means.view(np.uint32) >> 16).astype(np.uint16), scales, seed_bits]).view(np.uint8)
    header[: written.size] = written
    header[written.size :] = 0


def _read_header(header: np.ndarray, channels: int, blocks: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the means, the scales as bfloat16 bits, and the seed."""
    means, scales, seed_bits = np.split(header.copy().view(np.uint16), [channels, channels + blocks])
    return (means.astype(np.uint32) << 16).view(np.float32), scales, int(seed_bits[0]) | int(seed_bits[1]) << 16
