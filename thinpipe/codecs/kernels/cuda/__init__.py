"""Codec kernels for NVIDIA GPUs, in Triton: two or three launches, nothing that the host waits for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from thinpipe.codecs.kernels.cuda import brackets, codebook, codes, largest, places, select, tiles
from thinpipe.codecs.kernels.cuda.launch import INTERPRETED, launch
from thinpipe.codecs.kernels.cuda.zero import move_to_zero_kernel
from thinpipe.codecs.layout import BLOCK, chunk_bounds, header_bytes, positions_are_bits

DIRECT = 1 << 17  # so few values need no sample
PROGRAMS_PER_PROCESSOR = 2
COOPERATIVE = {"num_warps": 8, "maxnreg": 128, "launch_cooperative_grid": True}  # so many programs run at once
ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}  # each operation rounded by itself, as everywhere
BLOCKS = 4  # of 2048 codes, to a program


def encode_uniform(x: Tensor, wire: Tensor, bits: int, zero: bool = False) -> None:
    encode_sort(x, wire, bits, 0, zero)


def encode_kmeans(x: Tensor, wire: Tensor, bits: int, zero: bool = False) -> None:
    n, programs = x.numel(), _programs(x.device.index)
    counters = torch.zeros(codebook.COUNTERS, dtype=torch.int32, device=x.device)
    scratch = torch.empty(codebook.scratch_doubles(n, programs), dtype=torch.float64, device=x.device)
    room = codebook.slots_per_column(n, programs)
    launch(codebook.codebook_kernel, programs, (x, n, wire, counters, scratch, room), (bits, zero), **COOPERATIVE)
    _encode(x, wire, scratch.view(torch.float32), 2 * codebook.PARAMETERS.value, header_bytes(1 << bits), 1 << bits, 0)


def encode_sort(x: Tensor, wire: Tensor, level_bits: int, split_bits: int, zero: bool = False) -> None:
    chunks = 1 << split_bits
    cuts = [max(start - 1, 0) for start, _ in chunk_bounds(x.numel(), chunks)[1:]]
    scratch = order_statistics(x, cuts, wire, chunks=chunks, levels=(1 << level_bits) - 1)
    if zero:
        launch(move_to_zero_kernel, 1, (wire, scratch), (places.PARAMETERS.value, chunks, level_bits))
    _encode(x, wire, scratch, places.PARAMETERS.value, header_bytes(2 * chunks), chunks, level_bits)


encode_fast = encode_sort  # Algorithm 2 differs from Algorithm 1 in how it finds the buckets, not in what they are


def decode_buckets(wire: Tensor, out: Tensor, level_bits: int, split_bits: int) -> None:
    _decode(wire, out, 1 << split_bits, level_bits, header_bytes(2 << split_bits))


def decode_kmeans(wire: Tensor, out: Tensor, bits: int) -> None:
    _decode(wire, out, 1 << bits, 0, header_bytes(1 << bits))


def encode_tile(x: Tensor, wire: Tensor, bits: int, tile: int, rot: bool, sr: bool, zero: bool, key: int) -> None:
    n, span = x.numel(), max(tile, BLOCK)
    arguments = (x, n, wire, -(-n // tile), _signed(key & 0xFFFFFFFF), _signed(key >> 32))
    constants = (bits, tile, span, rot, sr, zero)
    if n >= span:
        launch(tiles.encode_tile_kernel, n // span, arguments, constants, **ONE_WARP)
    if n % span:
        spare = torch.empty(span, dtype=torch.uint8, device=x.device)
        launch(tiles.encode_rest_kernel, 1, (*arguments, spare), constants, **ONE_WARP)


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
    scratch = order_statistics(x, [n - kept], wire, chunks=2, levels=0, magnitude=True)
    threshold = places.EDGES.value + 2  # the last value of the first chunk
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


def order_statistics(
    x: Tensor, ranks: list[int], wire: Tensor, *, chunks: int, levels: int, magnitude: bool = False
) -> Tensor:
    """The values at these ranks and after each, and with them the wire's header; all is in the scratch memory."""
    n = x.numel()
    programs = _programs(x.device.index)
    sampled = bool(ranks) and n > DIRECT
    groups = -(-len(ranks) // 3) or 1
    counters = torch.zeros(groups, places.COUNTERS if ranks else 2, dtype=torch.int32, device=x.device)
    scratch = torch.empty(select.scratch_floats(n, programs, sampled), dtype=torch.float32, device=x.device)
    size, room = brackets.larger_sample(n), select.slots_per_column(n, programs)
    for i in range(groups):
        group = ranks[3 * i : 3 * i + 3]
        first, second, third = (group + 3 * group[-1:] + [0, 0, 0])[:3]
        launch(
            select.select_kernel,
            programs,
            (
                x,
                n,
                wire,
                counters if groups == 1 else counters[i],
                scratch,
                first,
                second,
                third,
                3 * i,
                levels,
                size,
                room,
            ),
            (len(group), chunks, i == groups - 1 and not magnitude, sampled, magnitude),
            **COOPERATIVE,
        )
    return scratch


def _encode(
    x: Tensor, wire: Tensor, scratch: Tensor, parameters: int, header: int, chunks: int, level_bits: int
) -> None:
    bits = level_bits + chunks.bit_length() - 1
    programs = -(-(x.numel() // BLOCK) // BLOCKS) + 1
    constants = (header, parameters, bits, chunks, level_bits, BLOCKS)
    launch(codes.encode_kernel, programs, (x, x.numel(), wire, scratch), constants)


def _decode(wire: Tensor, out: Tensor, chunks: int, level_bits: int, header: int) -> None:
    bits = level_bits + chunks.bit_length() - 1
    size = min(1 << bits, 1024)
    table = torch.empty(1 << bits, dtype=torch.float32, device=wire.device)
    launch(codes.table_kernel, (1 << bits) // size, (wire, table), (chunks, level_bits, size))
    n = out.numel()
    launch(codes.decode_kernel, -(-(n // BLOCK) // BLOCKS) + 1, (wire, table, out, n), (header, bits, BLOCKS))


@functools.cache
def _programs(index: int | None) -> int:
    """As many programs as can run at once; Triton's interpreter runs one after the other, so one."""
    if INTERPRETED:
        return 1
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(index).multi_processor_count
