"""Order statistics of a tensor: memory and launches for all of its cuts, 15 at a time (select.py)."""

import functools
from typing import Any

import torch
from torch import Tensor

from thinpipe.codecs.kernels.cuda import offsets
from thinpipe.codecs.kernels.cuda.counting import EACH, THREADS, capacity_for_all
from thinpipe.codecs.kernels.cuda.launch import INTERPRETED, Launch
from thinpipe.codecs.kernels.cuda.sample import PART, SMALL_PART, thresholds_kernel
from thinpipe.codecs.kernels.cuda.select import extent_kernel, header_number, read_kernel, select_kernel

DIRECT = 1 << 14  # up to this size no sample is needed
READING = {"num_warps": 8, "maxnreg": 128}  # two programs run on a multiprocessor at once
COOPERATIVE = READING | {"launch_cooperative_grid": True}
ONE_EACH = COOPERATIVE | {"maxnreg": 255}
MOST_CUTS = 15  # per launch


def all_at_once(x: Tensor) -> tuple[int, dict[str, Any]]:
    """Return the number of programs that can run at once, and so wait for each other, and their launch options.

    Large tensors have two programs per multiprocessor. Small ones, for which programs wait more often at barriers than
    for memory, have one, with all registers. Triton's interpreter runs programs one after the other, so it has one.
    """
    if INTERPRETED:
        return 1, COOPERATIVE
    processors = _processors(x.device.index)
    return (2 * processors, COOPERATIVE) if x.numel() >= offsets.LARGE.value else (processors, ONE_EACH)


@functools.cache
def _processors(index: int | None) -> int:
    return 1 if INTERPRETED else torch.cuda.get_device_properties(index).multi_processor_count


def slots_per_column(n: int, programs: int, cuts: int) -> int:
    """Return the slots for kept values: all of a small tensor, else twice the expected number and a margin."""
    most = capacity_for_all(n, programs)
    return min(most, 48 + most * (2 + cuts) // 80)


def order_statistics(
    x: Tensor, wire: Tensor, cuts: int, small: int, larger: int, *, buckets: tuple[int, int, bool] = (0, 0, False)
) -> tuple[Tensor, list[Launch]]:
    """Return the memory for the values at each cut and after it, and the launches that compute them.

    Cut i, from 1 on, comes before the value of rank ``i * small + min(i, larger)``. ``buckets``: their number, the bits
    of their levels, and whether one level is zero; with buckets the wire's header is written. Without, the order
    statistics are those of magnitudes.
    """
    n, (programs, options) = x.numel(), all_at_once(x)
    sampled = n > DIRECT
    capacity = slots_per_column(n, programs, min(cuts, MOST_CUTS)) if sampled else EACH.value
    floats = offsets.KEPT.value + capacity * THREADS.value * programs
    scratch = torch.empty(floats, dtype=torch.float32, device=x.device)
    launches = []
    for first in range(0, cuts, MOST_CUTS):
        counters = torch.zeros(offsets.COUNTERS.value, dtype=torch.int32, device=x.device)
        here = min(cuts - first, MOST_CUTS)
        header = header_number(*buckets) if first + here == cuts else 0
        tensor, magnitude = (x, n, counters, scratch), (not buckets[0],)
        cut = (small, larger, first, here)
        if sampled:
            constants = (*magnitude, SMALL_PART if n < offsets.LARGE.value else PART)
            launches.append(Launch(thresholds_kernel, programs, (*tensor, *cut), constants, options))
        launches.append(Launch(read_kernel, programs, (*tensor, capacity, int(sampled)), magnitude, READING))
        arguments = (x, n, wire, counters, scratch, *cut, header, capacity)
        launches.append(Launch(select_kernel, programs, arguments, magnitude, options))
    return scratch, launches


def extent(x: Tensor, wire: Tensor, level_bits: int, zero: bool) -> tuple[Tensor, list[Launch]]:
    """Return the memory and the launches for a tensor without cuts: one bucket, from its minimum to its maximum."""
    counters = torch.zeros(1, dtype=torch.int32, device=x.device)
    scratch = torch.empty(offsets.SPLITTER_VALUES.value, dtype=torch.float32, device=x.device)
    programs = min(offsets.MOST_PROGRAMS.value, 4 * _processors(x.device.index))
    arguments = (x, x.numel(), wire, counters, scratch, level_bits, int(zero))
    return scratch, [Launch(extent_kernel, programs, arguments, (), {"num_warps": 8})]
