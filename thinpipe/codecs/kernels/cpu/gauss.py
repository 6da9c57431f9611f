"""CPU kernels of ``gauss``: channel means first, then blocks, then the header."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from thinpipe.codecs.kernels.cpu.arrays import GRAIN, array_of, tile_shares
from thinpipe.codecs.kernels.cpu.loops.gauss import UNIT, channel_means, decode_blocks, encode_blocks
from thinpipe.codecs.kernels.cpu.threads import parallel, split
from thinpipe.codecs.layout import BLOCK, GAUSS_SAMPLES, GAUSS_SEED, gauss_reach, header_bytes
from thinpipe.codecs.normal import magnitude_boundaries, signed_levels

_RUN = 64  # from this many neighbouring values per channel each run of them is a loop of its own


def encode_gauss(
    x: Tensor, wire: Tensor, bits: int, tile: int, channels: int, inner: int, unbiased: bool, seed: int
) -> None:
    values, words = array_of(x), np.empty(-(-x.numel() // tile), np.uint16)
    means = means_of_channels(values, channels, inner)
    header, codes = np.split(wire.numpy(), [header_bytes(channels + words.size + GAUSS_SEED, 2)])
    reach, thresholds = np.float32(gauss_reach(tile)), np.array(magnitude_boundaries(bits), np.float32)
    levels = np.array(signed_levels(bits)[: 1 << (bits - 1)] if unbiased else (), np.float32)
    spread, run = spread_means(means, inner)
    parallel(
        lambda first, last: encode_blocks(
            values, spread, words, codes, first, last, tile, run, thresholds, levels, reach, seed
        ),
        tile_shares(values.size, UNIT),
    )
    write_header(header, means, words, seed)


def decode_gauss(wire: Tensor, out: Tensor, bits: int, tile: int, channels: int, inner: int) -> None:
    values, blocks = array_of(out), -(-out.numel() // tile)
    header, codes = np.split(wire.numpy(), [header_bytes(channels + blocks + GAUSS_SEED, 2)])
    means, words, seed = read_header(header, channels, blocks)
    levels = np.array(signed_levels(bits), np.float32)
    spread, run = spread_means(means, inner)
    parallel(
        lambda first, last: decode_blocks(codes, words, spread, values, first, last, bits, tile, run, levels, seed),
        tile_shares(values.size, UNIT),
    )


def means_of_channels(values: np.ndarray, channels: int, inner: int) -> np.ndarray:
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


def spread_means(means: np.ndarray, inner: int) -> tuple[np.ndarray, int]:
    """Return means and inner size for the loops: means of short runs are repeated per value, plus one unit."""
    if inner >= _RUN:
        return means, inner
    every = np.repeat(means, inner) if means.size else np.zeros(1, np.float32)
    return np.resize(every, every.size + UNIT), 1


def write_header(header: np.ndarray, means: np.ndarray, words: np.ndarray, seed: int) -> None:
    told = np.array([seed & 0xFFFF, seed >> 16], np.uint16)
    written = np.concatenate([(means.view(np.uint32) >> 16).astype(np.uint16), words, told]).view(np.uint8)
    header[: written.size] = written
    header[written.size :] = 0


def read_header(header: np.ndarray, channels: int, blocks: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the means, the scales as bfloat16 bits, and the seed."""
    means, words, told = np.split(header.copy().view(np.uint16), [channels, channels + blocks])
    return (means.astype(np.uint32) << 16).view(np.float32), words, int(told[0]) | int(told[1]) << 16
