"""Codec kernels for NVIDIA GPUs, in Triton: a few launches per call, without synchronization of host and device."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from thinpipe.codecs.golomb_rice import CODED_BLOCK, known_sizes, sections, size_table, starts_of
from thinpipe.codecs.kernels.cuda import codebook, codes, largest, offsets, tiles
from thinpipe.codecs.kernels.cuda import pca_components as pca
from thinpipe.codecs.kernels.cuda import rice_code as rice
from thinpipe.codecs.kernels.cuda import rotated_blocks as rotated
from thinpipe.codecs.kernels.cuda.launch import Launch, launch
from thinpipe.codecs.kernels.cuda.rank_search import all_at_once, extent, order_statistics
from thinpipe.codecs.layout import BLOCK, header_bytes, positions_are_bits
from thinpipe.codecs.normal import magnitude_boundaries, signed_levels

ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}  # no fused multiply-add: each operation is rounded separately
KEEPING = {"num_warps": 1, "maxnreg": 96}  # without a limit half as many programs run at once
COUNTING = {"num_warps": largest.WARPS.value}
TWO_WARPS = {"num_warps": 2, "enable_fp_fusion": False}
FOUR_BUCKETS = TWO_WARPS | {"maxnreg": 128}  # more programs run at once; slower with other numbers of buckets
SIXTEEN_WARPS = {"num_warps": 16}


def encode_kmeans(x: Tensor, wire: Tensor, bits: int, zero: bool = False) -> None:
    n, (programs, options) = x.numel(), all_at_once(x)
    counters = torch.zeros(codebook.COUNTERS, dtype=torch.int32, device=x.device)
    scratch = torch.empty(codebook.scratch_doubles(n, programs), dtype=torch.float64, device=x.device)
    capacity = codebook.slots_per_column(n, programs)
    parameters = scratch.view(torch.float32)[2 * codebook.PARAMETERS.value :]
    launch(
        Launch(codebook.points_kernel, programs, (x, n, counters, scratch, capacity), (), options),
        Launch(codebook.centres_kernel, 1, (wire, scratch), (bits, zero), SIXTEEN_WARPS),
        *_encode(x, wire, parameters, header_bytes(1 << bits), bits, 0),
    )


def encode_sort(x: Tensor, wire: Tensor, level_bits: int, split_bits: int, zero: bool = False) -> None:
    buckets = 1 << split_bits
    if buckets == 1:
        scratch, launches = extent(x, wire, level_bits, zero)
    else:
        small, larger = divmod(x.numel(), buckets)
        scratch, launches = order_statistics(x, wire, buckets - 1, small, larger, buckets=(buckets, level_bits, zero))
    parameters = scratch[offsets.PARAMETERS.value :]
    launch(*launches, *_encode(x, wire, parameters, header_bytes(2 * buckets), split_bits, level_bits))


encode_fast = encode_sort  # Algorithm 2 differs from Algorithm 1 in how it finds the buckets, not in what they are


def decode_buckets(wire: Tensor, out: Tensor, level_bits: int, split_bits: int) -> None:
    _decode(wire, out, split_bits, level_bits, header_bytes(2 << split_bits))


def decode_kmeans(wire: Tensor, out: Tensor, bits: int) -> None:
    _decode(wire, out, bits, 0, header_bytes(1 << bits))


def encode_tile(x: Tensor, wire: Tensor, bits: int, tile: int, rot: bool, sr: bool, zero: bool, key: int) -> None:
    n, span = x.numel(), max(tile, BLOCK)
    halves = (_signed(key & 0xFFFFFFFF), _signed(key >> 32))
    constants = (bits, tile, span, rot, sr, zero)
    if n >= span:
        launch(Launch(tiles.encode_tile_kernel, n // span, (x, wire, -(-n // tile), *halves), constants, ONE_WARP))
    if n % span:
        spare = torch.empty(span, dtype=torch.uint8, device=x.device)
        launch(Launch(tiles.encode_rest_kernel, 1, (x, n, wire, *halves, spare), constants, ONE_WARP))


def decode_tile(wire: Tensor, out: Tensor, bits: int, tile: int, rot: bool, zero: bool) -> None:
    n, span = out.numel(), max(tile, BLOCK)
    constants = (bits, tile, span, rot, zero)
    if n >= span:
        launch(Launch(tiles.decode_tile_kernel, n // span, (wire, out, -(-n // tile)), constants, ONE_WARP))
    if n % span:
        launch(Launch(tiles.decode_rest_kernel, 1, (wire, out, n, -(-n // tile)), constants, ONE_WARP))


def find_gains(z: Tensor, share: Tensor, gains: Tensor) -> None:
    count, rows = z.shape
    launch(Launch(pca.find_gains_kernel, -(-rows // pca.ROWS.value), (z, share, gains, rows, count)))


def encode_axes(z: Tensor, gains: Tensor, bits: Tensor, starts: Tensor, limits: Tensor, planes: Tensor) -> None:
    arguments = (z, gains, bits, starts, limits, planes, z.shape[1], len(planes))
    launch(Launch(pca.encode_planes_kernel, _axis_programs(z), arguments))


def decode_axes(planes: Tensor, gains: Tensor, bits: Tensor, starts: Tensor, levels: Tensor, z: Tensor) -> None:
    arguments = (planes, gains, bits, starts, levels, z, z.shape[1], len(planes))
    launch(Launch(pca.decode_planes_kernel, _axis_programs(z), arguments))


def fold_moments(
    step: Tensor, size: int, rate: float, seen: int, before: Tensor, weight: Tensor, moments: Tensor, new_weight: Tensor
) -> None:
    arguments = (step, before, weight, moments, new_weight, size, len(step), seen)
    launch(Launch(pca.fold_moments_kernel, -(-len(step) // pca.MOMENTS.value), arguments, (rate,)))


def _axis_programs(z: Tensor) -> int:
    return z.shape[0] * -(-z.shape[1] // (8 * pca.STEP.value))


def encode_gauss(
    x: Tensor, wire: Tensor, bits: int, tile: int, channels: int, inner: int, unbiased: bool, seed: int
) -> None:
    n, span = x.numel(), rotated.span_of(tile)
    tables, _ = _normal(bits, x.device)
    form, length = rotated.form_of(channels, inner, tile, span)
    means = _compute_means(x, wire, channels, inner, form, length)
    constants = (bits, tile, form + rotated.UNBIASED * unbiased)
    if n >= span:
        full = (x, wire, means, tables, -(-n // tile), channels, length, _signed(seed))
        launch(Launch(rotated.encode_gauss_kernel, n // span, full, constants, ONE_WARP))
    if n % span:
        spare = torch.empty(span, dtype=torch.uint8, device=x.device)
        rest = (x, n, wire, means, tables, channels, length, spare, _signed(seed))
        launch(Launch(rotated.encode_rest_kernel, 1, rest, constants, ONE_WARP))


def decode_gauss(wire: Tensor, out: Tensor, bits: int, tile: int, channels: int, inner: int) -> None:
    n, span = out.numel(), rotated.span_of(tile)
    _, levels = _normal(bits, out.device)
    form, length = rotated.form_of(channels, inner, tile, span)
    means = _load_means(wire, channels, form, length)
    arguments, constants = (means, levels, -(-n // tile), channels, length), (bits, tile, form)
    if n >= span:
        launch(Launch(rotated.decode_gauss_kernel, n // span, (wire, out, *arguments), constants, ONE_WARP))
    if n % span:
        launch(Launch(rotated.decode_rest_kernel, 1, (wire, out, n, *arguments), constants, ONE_WARP))


def encode_coded(x: Tensor, wire: Tensor, budget: int, channels: int, inner: int, unbiased: bool, seed: int) -> None:
    n, blocks = x.numel(), -(-x.numel() // CODED_BLOCK)
    form, length = rotated.form_of(channels, inner, CODED_BLOCK, CODED_BLOCK)
    means = _compute_means(x, wire, channels, inner, form, length)
    counts = torch.zeros(rice.ENERGIES.value, dtype=torch.int32, device=x.device)
    energies = torch.empty(blocks, dtype=torch.int32, device=x.device)
    looking = (x, n, means, energies, counts, channels, length, _signed(seed))
    launch(Launch(rice.energies_kernel, blocks, looking, (form,), ONE_WARP))
    sizes = allot_coded(energies, counts, budget)
    wire[2 * channels :].zero_()  # padding and the unused end: only the device knows where the last block ends
    forms = rice.forms_on(x.device)
    gathered, _, _ = rice.masked_on(x.device)
    arguments = (x, n, wire, means, sizes, starts_of(sizes), forms, gathered, channels, length, _signed(seed))
    launch(Launch(rice.encode_coded_kernel, blocks, arguments, (form + rotated.UNBIASED * unbiased,), ONE_WARP))


def allot_coded(energies: Tensor, counts: Tensor, budget: int) -> Tensor:
    """Return the sizes of blocks from their energies.

    ``counts``, the histogram of the energies, is overwritten.
    """
    blocks, device, sizes = len(energies), energies.device, torch.empty_like(energies)
    limit, programs = torch.empty_like(energies[:1]), -(-blocks // rice.SIZES.value)
    launch(
        Launch(rice.limit_kernel, 1, (counts, rice.rises_on(device), limit, blocks, budget), (), SIXTEEN_WARPS),
        Launch(rice.sizes_kernel, programs, (energies, limit, size_table(device), sizes, blocks)),
    )
    return sizes


def decode_coded(wire: Tensor, out: Tensor, budget: int, channels: int, inner: int) -> None:
    n, blocks = out.numel(), -(-out.numel() // CODED_BLOCK)
    form, length = rotated.form_of(channels, inner, CODED_BLOCK, CODED_BLOCK)
    means, (first, _) = _load_means(wire, channels, form, length), sections(blocks, channels)
    sizes = known_sizes(wire.device)[wire[first : first + blocks].int()]
    forms = rice.forms_on(wire.device)
    _, scattered, spread = rice.masked_on(wire.device)
    arguments = (wire, out, n, means, sizes, starts_of(sizes), forms, scattered, spread, budget, channels, length)
    launch(Launch(rice.decode_coded_kernel, blocks, arguments, (form,), ONE_WARP))


def _compute_means(x: Tensor, wire: Tensor, channels: int, inner: int, form: int, length: int) -> Tensor:
    """Return the means of channels, and write them to the wire."""
    means = torch.empty(channels, dtype=torch.float32, device=x.device)
    if channels:
        arguments = (x, x.numel(), wire, means, channels, inner)
        launch(Launch(rotated.channel_means_kernel, -(-channels // rotated.CHANNELS.value), arguments))
    return _in_turn(means, form, length)


def _load_means(wire: Tensor, channels: int, form: int, length: int) -> Tensor:
    means = torch.empty(channels, dtype=torch.float32, device=wire.device)
    if channels:
        launch(Launch(rotated.read_means_kernel, -(-channels // rotated.READ.value), (wire, means, channels)))
    return _in_turn(means, form, length)


def _in_turn(means: Tensor, form: int, length: int) -> Tensor:
    """Return the means repeated for every place of a round; all forms but runs of one channel need this."""
    if form == rotated.RUNS.value or len(means) == length or not len(means):
        return means
    return means.repeat_interleave(length // len(means), output_size=length)


@cache
def _normal(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a table of boundaries between positive levels, infinity and these levels; and the levels of all codes."""
    levels = signed_levels(bits)
    tables = [*magnitude_boundaries(bits), torch.inf, *levels[: len(levels) // 2]]
    return torch.tensor(tables, device=device), torch.tensor(levels, device=device)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


def encode_topk(x: Tensor, wire: Tensor, kept: int) -> None:
    n = x.numel()
    scratch, launches = order_statistics(x, wire, 1, n - kept + 1, 0)
    threshold = scratch[offsets.EDGES.value + codes.MOST_BUCKETS :]  # the last value before the cut
    steps, blocks, groups, counts = largest.parts_of(x)
    constants = (positions_are_bits(n, kept), _aligned(wire))
    launch(
        *launches,
        Launch(largest.count_largest_kernel, groups, (x, n, threshold, counts, steps), (), COUNTING),
        Launch(largest.keep_largest_kernel, blocks, (x, n, wire, threshold, counts, kept, steps), constants, KEEPING),
    )


def decode_topk(wire: Tensor, out: Tensor, kept: int) -> None:
    n, aligned = out.numel(), (_aligned(wire),)
    if not positions_are_bits(n, kept):
        blocks = -(-kept // largest.STEP.value)
        launch(Launch(largest.place_by_index_kernel, blocks, (wire, out.zero_(), n, kept), aligned))
        return
    steps, blocks, groups, counts = largest.parts_of(out)
    launch(
        Launch(largest.count_bits_kernel, groups, (wire, n, kept, counts, steps), (), COUNTING),
        Launch(largest.place_by_bits_kernel, blocks, (wire, out, n, kept, counts, steps), aligned, ONE_WARP),
    )


def _aligned(wire: Tensor) -> bool:
    """Return True if float32 values can be stored to a wire without being split into bytes."""
    return wire.data_ptr() % 4 == 0


def _encode(
    x: Tensor, wire: Tensor, parameters: Tensor, header: int, split_bits: int, level_bits: int
) -> Iterator[Launch]:
    n, constants = x.numel(), (split_bits + level_bits, 1 << split_bits, level_bits)
    options = FOUR_BUCKETS if level_bits and split_bits in (1, 2) else TWO_WARPS
    if n >= BLOCK:
        yield Launch(codes.encode_kernel, n // BLOCK, (x, wire, parameters, header), constants, options)
    if n % BLOCK:
        yield Launch(codes.encode_rest_kernel, 1, (x, n, wire, parameters, header), constants, options)


def _decode(wire: Tensor, out: Tensor, split_bits: int, level_bits: int, header: int) -> None:
    n, bits = out.numel(), split_bits + level_bits
    looked_up = bits <= codes.LOOKED_UP.value
    entries = 1 << (bits if looked_up else split_bits)
    size = min(entries, 1024)
    table = torch.empty(entries if looked_up else 6 * entries, dtype=torch.float32, device=wire.device)
    launches = [Launch(codes.table_kernel, entries // size, (wire, table), (bits, 1 << split_bits, level_bits, size))]
    constants, options = (bits, level_bits), ONE_WARP if looked_up else TWO_WARPS
    if n >= BLOCK:
        launches.append(Launch(codes.decode_kernel, n // BLOCK, (wire, table, out, header), constants, options))
    if n % BLOCK:
        launches.append(Launch(codes.decode_rest_kernel, 1, (wire, table, out, n, header), constants, options))
    launch(*launches)
