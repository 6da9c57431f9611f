"""Codec kernels for the CPU: a few reads of the tensor and one write of the wire, no sort of it, no index arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.kernels.axes import find_gains as find_gains
from thinpipe.codecs.kernels.cpu.codebook import best_codebook, groups_of
from thinpipe.codecs.kernels.cpu.loops.axes import decode_planes, encode_planes
from thinpipe.codecs.kernels.cpu.loops.codes import encode_buckets, encode_codebook
from thinpipe.codecs.kernels.cpu.loops.gauss import UNIT, channel_means, decode_blocks, encode_blocks
from thinpipe.codecs.kernels.cpu.loops.largest import (
    count_bits,
    count_from,
    keep_largest,
    place_by_index,
    place_by_mask,
)
from thinpipe.codecs.kernels.cpu.loops.pack import look_up
from thinpipe.codecs.kernels.cpu.loops.tiles import decode_tiles, encode_tiles
from thinpipe.codecs.kernels.cpu.order import GRAIN, extent, key_floats, order_statistics, shares
from thinpipe.codecs.kernels.cpu.threads import parallel, split
from thinpipe.codecs.layout import (
    BLOCK,
    GAUSS_SAMPLES,
    GAUSS_SEED,
    bucket_affine,
    bucket_bounds,
    bucket_values,
    gauss_reach,
    header_bytes,
    midpoints,
    move_to_zero,
    positions_are_bits,
    read_header,
    with_zero,
    write_header,
    write_poisoned,
)
from thinpipe.codecs.normal import magnitude_boundaries, signed_levels

_RUN = 64  # neighbouring values of one channel, from which on each such run is a loop of its own
_INFINITY = 0x7F800000  # its key; the key of -infinity is ~_INFINITY


def encode_uniform(x: Tensor, wire: Tensor, bits: int, zero: bool = False) -> None:
    encode_sort(x, wire, bits, 0, zero)


def encode_sort(x: Tensor, wire: Tensor, level_bits: int, split_bits: int, zero: bool = False) -> None:
    values = _array(x)
    bounds = bucket_bounds(values.size, 1 << split_bits)
    if split_bits:
        wanted = np.array([(start, stop - 1) for start, stop in bounds if start < stop])
        ranks, places = np.unique(wanted, return_inverse=True)
        low, high, found = order_statistics(values, ranks)
        edges = found[places.reshape(wanted.shape)]
    else:
        low, high = extent(values)
        edges = np.array([[low, high]])
    if not ~_INFINITY < low <= high < _INFINITY:
        write_poisoned(wire, 2 << split_bits)
        return
    # Fewer values than buckets leaves the last ones empty: they repeat the largest value.
    missing = len(bounds) - len(edges)
    lo, hi = torch.from_numpy(key_floats(np.concatenate([edges, np.full((missing, 2), high)]).T)).contiguous()
    cuts = hi[:-1].numpy()  # where values are, wherever +zero moves the levels
    if zero:
        lo, hi = move_to_zero(lo, hi, level_bits)
    write_header(wire, torch.stack([lo, hi]))
    p, offset, scale = (t.numpy() for t in bucket_affine(lo, hi, (1 << level_bits) - 1))
    codes = wire.numpy()[header_bytes(2 << split_bits) :]
    parallel(
        lambda first, last: encode_buckets(values, codes, first, last, cuts, p, offset, scale, level_bits, split_bits),
        shares(values),
    )


encode_fast = encode_sort  # Algorithm 2 differs from Algorithm 1 in how it finds the buckets, not in what they are


def decode_buckets(wire: Tensor, out: Tensor, level_bits: int, split_bits: int) -> None:
    lo, hi = read_header(wire, 2 << split_bits).view(2, -1)
    _look_up(wire[header_bytes(2 << split_bits) :], bucket_values(lo, hi, level_bits), out, level_bits + split_bits)


def encode_kmeans(x: Tensor, wire: Tensor, bits: int, zero: bool = False) -> None:
    values = _array(x)
    low, high, points, weights = groups_of(values)
    if not ~_INFINITY < low <= high < _INFINITY:
        write_poisoned(wire, 1 << bits)
        return
    codebook = torch.from_numpy(best_codebook(points, weights, bits))
    if zero and low <= 0 and high >= -1:  # keys, -1 that of -0
        codebook = with_zero(codebook)
    write_header(wire, codebook)
    thresholds = midpoints(codebook).numpy()
    codes = wire.numpy()[header_bytes(1 << bits) :]
    parallel(
        lambda first, last: encode_codebook(values, codes, first, last, thresholds, bits),
        shares(values),
    )


def decode_kmeans(wire: Tensor, out: Tensor, bits: int) -> None:
    _look_up(wire[header_bytes(1 << bits) :], read_header(wire, 1 << bits), out, bits)


def encode_tile(x: Tensor, wire: Tensor, bits: int, tile: int, rot: bool, sr: bool, zero: bool, key: int) -> None:
    values = _array(x)
    words = np.empty((2, -(-values.size // tile)), np.uint16)
    header, codes = np.split(wire.numpy(), [words.nbytes])
    parallel(
        lambda first, last: encode_tiles(values, words, codes, first, last, bits, tile, rot, sr, zero, np.uint64(key)),
        _tile_shares(values.size, tile),
    )
    header[:] = words.reshape(-1).view(np.uint8)


def decode_tile(wire: Tensor, out: Tensor, bits: int, tile: int, rot: bool, zero: bool) -> None:
    values = _array(out)
    tiles = -(-values.size // tile)
    header, codes = np.split(wire.numpy(), [4 * tiles])
    words = header.copy().view(np.uint16).reshape(2, tiles)
    parallel(
        lambda first, last: decode_tiles(codes, words, values, first, last, bits, tile, rot, zero),
        _tile_shares(values.size, tile),
    )


def _tile_shares(count: int, tile: int) -> list[tuple[int, int]]:
    """The units of the tile loops, which are whole tiles and whole blocks, as one share for each thread."""
    unit = max(tile, BLOCK)
    return split(-(-count // unit), GRAIN * BLOCK // unit)


def encode_gauss(
    x: Tensor, wire: Tensor, bits: int, tile: int, channels: int, inner: int, unbiased: bool, seed: int
) -> None:
    values = _array(x)
    means = np.zeros(channels, np.float32)
    words = np.empty(-(-values.size // tile), np.uint16)
    if channels:
        of_each = values.size // channels
        sample = np.arange(min(of_each, GAUSS_SAMPLES)) * of_each // min(of_each, GAUSS_SAMPLES)
        places = sample // inner * (channels * inner) + sample % inner
        parallel(
            lambda first, last: channel_means(values, means, places, first, last, inner),
            split(channels, -(-GRAIN * BLOCK // places.size)),
        )
    header, codes = np.split(wire.numpy(), [header_bytes(channels + words.size + GAUSS_SEED, 2)])
    reach, thresholds = np.float32(gauss_reach(tile)), np.array(magnitude_boundaries(bits), np.float32)
    levels = np.array(signed_levels(bits)[: 1 << (bits - 1)] if unbiased else (), np.float32)
    spread, run = _spread_means(means, inner, UNIT)
    parallel(
        lambda first, last: encode_blocks(
            values, spread, words, codes, first, last, tile, run, thresholds, levels, reach, seed
        ),
        _tile_shares(values.size, UNIT),
    )
    told = np.array([seed & 0xFFFF, seed >> 16], np.uint16)
    written = np.concatenate([(means.view(np.uint32) >> 16).astype(np.uint16), words, told]).view(np.uint8)
    header[: written.size] = written
    header[written.size :] = 0


def decode_gauss(wire: Tensor, out: Tensor, bits: int, tile: int, channels: int, inner: int) -> None:
    values = _array(out)
    blocks = -(-values.size // tile)
    header, codes = np.split(wire.numpy(), [header_bytes(channels + blocks + GAUSS_SEED, 2)])
    means, words, told = np.split(header.copy().view(np.uint16), [channels, channels + blocks])
    seed = int(told[0]) | int(told[1]) << 16
    levels = np.array(signed_levels(bits), np.float32)
    spread, run = _spread_means((means.astype(np.uint32) << 16).view(np.float32), inner, UNIT)
    parallel(
        lambda first, last: decode_blocks(codes, words, spread, values, first, last, bits, tile, run, levels, seed),
        _tile_shares(values.size, UNIT),
    )


def _spread_means(means: np.ndarray, inner: int, unit: int) -> tuple[np.ndarray, int]:
    """Means and inner size as the loops want them: without long runs one for each of the places, and a unit more."""
    if inner >= _RUN:
        return means, inner
    every = np.repeat(means, inner) if means.size else np.zeros(1, np.float32)
    return np.resize(every, every.size + unit), 1


def encode_topk(x: Tensor, wire: Tensor, kept: int) -> None:
    values = _array(x)
    _, _, (threshold,) = order_statistics(values, np.array([values.size - kept]), magnitude=True)
    parts = shares(values)
    counts = parallel(lambda first, last: count_from(values, first, last, threshold), parts)
    as_bits = positions_are_bits(values.size, kept)
    head, rest = np.split(wire.numpy(), [4 * kept])
    largest = head.view(np.float32)
    positions = rest[: 0 if as_bits else None].view(np.int32)
    mask = rest[: None if as_bits else 0]
    # Of the values equal to the threshold the first ones fill up the count: how many of them each thread may take.
    missing = kept - sum(above for above, _ in counts)
    place, work = 0, []
    for (first, last), (above, equal) in zip(parts, counts, strict=True):
        ties = min(missing, equal)
        work.append((first, last, ties, place))
        missing -= ties
        place += above + ties
    parallel(
        lambda first, last, ties, place: keep_largest(
            values, first, last, threshold, ties, place, largest, positions, mask
        ),
        work,
    )


def decode_topk(wire: Tensor, out: Tensor, kept: int) -> None:
    values = _array(read_header(wire, kept).to(out.dtype))
    rest = wire.numpy()[4 * kept :]
    target = _array(out)
    if not positions_are_bits(target.size, kept):
        target[:] = 0
        place_by_index(rest.copy().view(np.int32), values, target)
        return
    parts = split(rest.size, GRAIN * BLOCK // 8)
    counts = parallel(lambda first, last: count_bits(rest, first, last), parts)
    before = np.minimum(np.cumsum([0, *counts]), kept).tolist()
    parallel(
        lambda first, last, place: place_by_mask(rest, first, last, values, place, target),
        [(*part, place) for part, place in zip(parts, before, strict=False)],
    )


def encode_axes(z: Tensor, gains: Tensor, bits: Tensor, starts: Tensor, limits: Tensor, planes: Tensor) -> None:
    _in_axes(encode_planes, z.shape, z, gains.float(), bits, starts, limits, planes)


def decode_axes(planes: Tensor, gains: Tensor, bits: Tensor, starts: Tensor, levels: Tensor, z: Tensor) -> None:
    _in_axes(decode_planes, z.shape, planes, gains.float(), bits, starts, levels, z)


def _in_axes(loop: Callable[..., None], shape: torch.Size, *tensors: Tensor) -> None:
    arrays = [each.numpy() for each in tensors]
    parallel(loop, [(*arrays, *part) for part in split(shape[0], max(1, GRAIN // shape[1]))])


def _array(x: Tensor) -> np.ndarray:
    """A contiguous float tensor as the flat array that the loops know its type by."""
    flat = x.reshape(-1)
    if x.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy()
    return flat.view(torch.uint16).numpy() if x.dtype == torch.float16 else flat.numpy()


def _look_up(packed: Tensor, table: Tensor, out: Tensor, bits: int) -> None:
    codes, entries, values = packed.numpy(), _array(table.to(out.dtype)), _array(out)
    parallel(lambda first, last: look_up(codes, entries, values, first, last, bits), shares(values))
