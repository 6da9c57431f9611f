"""Codec kernels for NVIDIA GPUs, in Triton: two or three launches, nothing that the host waits for."""

from __future__ import annotations

import torch
from torch import Tensor

from thinpipe.codecs.kernels.cuda import codebook, codes, largest, places, tiles
from thinpipe.codecs.kernels.cuda.launch import launch
from thinpipe.codecs.kernels.cuda.order import COOPERATIVE, order_statistics, programs_on
from thinpipe.codecs.kernels.cuda.zero import move_to_zero_kernel
from thinpipe.codecs.layout import BLOCK, bucket_bounds, header_bytes, positions_are_bits

ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}  # each operation rounded by itself, as everywhere
BLOCKS = 4  # of 2048 codes, to a program


def encode_uniform(x: Tensor, wire: Tensor, bits: int, zero: bool = False) -> None:
    encode_sort(x, wire, bits, 0, zero)


def encode_kmeans(x: Tensor, wire: Tensor, bits: int, zero: bool = False) -> None:
    n, programs = x.numel(), programs_on(x.device.index)
    counters = torch.zeros(codebook.COUNTERS, dtype=torch.int32, device=x.device)
    scratch = torch.empty(codebook.scratch_doubles(n, programs), dtype=torch.float64, device=x.device)
    room = codebook.slots_per_column(n, programs)
    launch(codebook.codebook_kernel, programs, (x, n, wire, counters, scratch, room), (bits, zero), **COOPERATIVE)
    _encode(x, wire, scratch.view(torch.float32), 2 * codebook.PARAMETERS.value, header_bytes(1 << bits), 1 << bits, 0)


def encode_sort(x: Tensor, wire: Tensor, level_bits: int, split_bits: int, zero: bool = False) -> None:
    buckets = 1 << split_bits
    cuts = [max(start - 1, 0) for start, _ in bucket_bounds(x.numel(), buckets)[1:]]
    scratch = order_statistics(x, cuts, wire, buckets=buckets, levels=(1 << level_bits) - 1)
    if zero:
        launch(move_to_zero_kernel, 1, (wire, scratch), (places.PARAMETERS.value, buckets, level_bits))
    _encode(x, wire, scratch, places.PARAMETERS.value, header_bytes(2 * buckets), buckets, level_bits)


encode_fast = encode_sort  # Algorithm 2 differs from Algorithm 1 in how it finds the buckets, not in what they are


def decode_buckets(wire: Tensor, out: Tensor, level_bits: int, split_bits: int) -> None:
    _decode(wire, out, 1 << split_bits, level_bits, header_bytes(2 << split_bits))


def decode_kmeans(wire: Tensor, out: Tensor, bits: int) -> None:
    _decode(wire, out, 1 << bits, 0, header_bytes(1 << bits))


def encode_tile(x: Tensor, wire: Tensor, bits: int, tile: int, rot: bool, sr: bool, zero: bool, key: int) -> None:
    n, span = x.numel(), max(tile, BLOCK)
    words = (_signed(key & 0xFFFFFFFF), _signed(key >> 32))
    constants = (bits, tile, span, rot, sr, zero)
    if n >= span:
        launch(tiles.encode_tile_kernel, n // span, (x, wire, -(-n // tile), *words), constants, **ONE_WARP)
    if n % span:
        spare = torch.empty(span, dtype=torch.uint8, device=x.device)
        launch(tiles.encode_rest_kernel, 1, (x, n, wire, *words, spare), constants, **ONE_WARP)


def decode_tile(wire: Tensor, out: Tensor, bits: int, tile: int, rot: bool, zero: bool) -> None:
    n, span = out.numel(), max(tile, BLOCK)
    constants = (bits, tile, span, rot, zero)
    if n >= span:
        launch(tiles.decode_tile_kernel, n // span, (wire, out, -(-n // tile)), constants, **ONE_WARP)
    if n % span:
        launch(tiles.decode_rest_kernel, 1, (wire, out, n, -(-n // tile)), constants, **ONE_WARP)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def encode_topk(x: Tensor, wire: Tensor, kept: int) -> None:
    n = x.numel()
    scratch = order_statistics(x, [n - kept], wire, buckets=2, levels=0, magnitude=True)
    threshold = places.EDGES.value + 2  # the last value of the first bucket
    blocks = -(-n // largest.BLOCK.value)
    counts = torch.empty(blocks, 2, dtype=torch.int64, device=x.device)
    launch(largest.count_largest_kernel, blocks, (x, n, scratch, counts), (threshold,))
    reached = counts.cumsum(0)
    constants = (threshold, positions_are_bits(n, kept))
    launch(largest.keep_largest_kernel, blocks, (x, n, wire, scratch, reached, kept, blocks), constants)


def decode_topk(wire: Tensor, out: Tensor, kept: int) -> None:
    n = out.numel()
    if not positions_are_bits(n, kept):
        launch(largest.place_by_index_kernel, -(-kept // largest.BLOCK.value), (wire, out.zero_(), n, kept), ())
        return
    blocks = -(-n // largest.BLOCK.value)
    counts = torch.empty(blocks, dtype=torch.int64, device=wire.device)
    launch(largest.count_bits_kernel, blocks, (wire, n, kept, counts), ())
    launch(largest.place_by_bits_kernel, blocks, (wire, out, n, kept, counts.cumsum(0)), ())


def _encode(
    x: Tensor, wire: Tensor, scratch: Tensor, parameters: int, header: int, buckets: int, level_bits: int
) -> None:
    bits = level_bits + buckets.bit_length() - 1
    programs = -(-(x.numel() // BLOCK) // BLOCKS) + 1
    constants = (header, parameters, bits, buckets, level_bits, BLOCKS)
    launch(codes.encode_kernel, programs, (x, x.numel(), wire, scratch), constants)


def _decode(wire: Tensor, out: Tensor, buckets: int, level_bits: int, header: int) -> None:
    bits = level_bits + buckets.bit_length() - 1
    size = min(1 << bits, 1024)
    table = torch.empty(1 << bits, dtype=torch.float32, device=wire.device)
    launch(codes.table_kernel, (1 << bits) // size, (wire, table), (buckets, level_bits, size))
    n = out.numel()
    launch(codes.decode_kernel, -(-(n // BLOCK) // BLOCKS) + 1, (wire, table, out, n), (header, bits, BLOCKS))
