"""Codec kernels for the CPU: they read the tensor a few times and write the wire once; no sort, no index arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.kernels.cpu.codebook import best_codebook, groups_of
from thinpipe.codecs.kernels.cpu.loops.codes import encode_buckets, encode_codebook
from thinpipe.codecs.kernels.cpu.loops.largest import (
    count_bits,
    count_from,
    keep_largest,
    place_by_index,
    place_by_mask,
)
from thinpipe.codecs.kernels.cpu.loops.pack import look_up
from thinpipe.codecs.kernels.cpu.loops.pca_rows import decode_planes, encode_planes
from thinpipe.codecs.kernels.cpu.loops.tiles import decode_tiles, encode_tiles
from thinpipe.codecs.kernels.cpu.order import extent, key_floats, order_statistics
from thinpipe.codecs.kernels.cpu.rotated_blocks import decode_coded as decode_coded
from thinpipe.codecs.kernels.cpu.rotated_blocks import decode_gauss as decode_gauss
from thinpipe.codecs.kernels.cpu.rotated_blocks import encode_coded as encode_coded
from thinpipe.codecs.kernels.cpu.rotated_blocks import encode_gauss as encode_gauss
from thinpipe.codecs.kernels.cpu.threads import GRAIN, array_of, parallel, shares, split, tile_shares
from thinpipe.codecs.kernels.reference.pca import find_gains as find_gains
from thinpipe.codecs.kernels.reference.pca import fold_moments as fold_moments
from thinpipe.codecs.layout import (
    BLOCK,
    bucket_affine,
    bucket_bounds,
    bucket_values,
    header_bytes,
    midpoints,
    move_to_zero,
    positions_are_bits,
    read_header,
    with_zero,
    write_header,
    write_poisoned,
)

_INFINITY = 0x7F800000  # its key; the key of -infinity is ~_INFINITY


def encode_sort(x: Tensor, wire: Tensor, level_bits: int, split_bits: int, zero: bool = False) -> None:
    values = array_of(x)
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
    # With fewer values than buckets the last buckets are empty: they repeat the largest value.
    missing = len(bounds) - len(edges)
    lo, hi = torch.from_numpy(key_floats(np.concatenate([edges, np.full((missing, 2), high)]).T)).contiguous()
    cuts = hi[:-1].numpy()  # cuts follow the values, even where +zero moves the levels
    if zero:
        lo, hi = move_to_zero(lo, hi, level_bits)
    write_header(wire, torch.stack([lo, hi]))
    p, offset, scale = (t.numpy() for t in bucket_affine(lo, hi, (1 << level_bits) - 1))
    codes = wire.numpy()[header_bytes(2 << split_bits) :]
    parallel(
        lambda first, last: encode_buckets(values, codes, first, last, cuts, p, offset, scale, level_bits, split_bits),
        shares(values),
    )


encode_fast = encode_sort  # Algorithm 2 finds the same buckets as Algorithm 1, by other means


def decode_buckets(wire: Tensor, out: Tensor, level_bits: int, split_bits: int) -> None:
    lo, hi = read_header(wire, 2 << split_bits).view(2, -1)
    _look_up(wire[header_bytes(2 << split_bits) :], bucket_values(lo, hi, level_bits), out, level_bits + split_bits)


def encode_kmeans(x: Tensor, wire: Tensor, bits: int, zero: bool = False) -> None:
    values = array_of(x)
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
    values = array_of(x)
    params = np.empty((2, -(-values.size // tile)), np.uint16)
    header, codes = np.split(wire.numpy(), [params.nbytes])
    parallel(
        lambda first, last: encode_tiles(values, params, codes, first, last, bits, tile, rot, sr, zero, np.uint64(key)),
        tile_shares(values.size, tile),
    )
    header[:] = params.reshape(-1).view(np.uint8)


def decode_tile(wire: Tensor, out: Tensor, bits: int, tile: int, rot: bool, zero: bool) -> None:
    values = array_of(out)
    tiles = -(-values.size // tile)
    header, codes = np.split(wire.numpy(), [4 * tiles])
    params = header.copy().view(np.uint16).reshape(2, tiles)
    parallel(
        lambda first, last: decode_tiles(codes, params, values, first, last, bits, tile, rot, zero),
        tile_shares(values.size, tile),
    )


def encode_topk(x: Tensor, wire: Tensor, kept: int) -> None:
    values = array_of(x)
    _, _, (threshold,) = order_statistics(values, np.array([values.size - kept]), magnitude=True)
    parts = shares(values)
    counts = parallel(lambda first, last: count_from(values, first, last, threshold), parts)
    as_bits = positions_are_bits(values.size, kept)
    head, rest = np.split(wire.numpy(), [4 * kept])
    largest = head.view(np.float32)
    positions = rest[: 0 if as_bits else None].view(np.int32)
    mask = rest[: None if as_bits else 0]
    # The first values equal to the threshold fill up the count: compute how many of them each thread may take.
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
    values = array_of(read_header(wire, kept).to(out.dtype))
    rest = wire.numpy()[4 * kept :]
    target = array_of(out)
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


def _look_up(packed: Tensor, table: Tensor, out: Tensor, bits: int) -> None:
    codes, entries, values = packed.numpy(), array_of(table.to(out.dtype)), array_of(out)
    parallel(lambda first, last: look_up(codes, entries, values, first, last, bits), shares(values))
