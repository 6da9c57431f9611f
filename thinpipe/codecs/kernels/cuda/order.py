"""Order statistics of a tensor: memory and launches for all of its cuts, three at a time (select.py)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from thinpipe.codecs.kernels.cuda import places
from thinpipe.codecs.kernels.cuda.brackets import SAMPLE, larger_sample
from thinpipe.codecs.kernels.cuda.device import COLUMNS
from thinpipe.codecs.kernels.cuda.launch import INTERPRETED, launch
from thinpipe.codecs.kernels.cuda.reading import room_for_all
from thinpipe.codecs.kernels.cuda.select import select_kernel

DIRECT = 1 << 17  # so few values need no sample
PROGRAMS_PER_PROCESSOR = 2
COOPERATIVE = {"num_warps": 8, "maxnreg": 128, "launch_cooperative_grid": True}  # so many programs run at once


@functools.cache
def programs_on(index: int | None) -> int:
    """As many programs as can run at once; Triton's interpreter runs one after the other, so one."""
    if INTERPRETED:
        return 1
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(index).multi_processor_count


def slots_per_column(n: int, programs: int) -> int:
    """Room for kept values: for all of a small tensor, else for three times as many as expected."""
    most = room_for_all(n, programs)
    return min(most, 96 + most // 10)


def _scratch_floats(n: int, programs: int, sampled: bool) -> int:
    size = places.DRAWN.value + SAMPLE.value
    if sampled:
        size += max(larger_sample(n), places.LISTS.value) + slots_per_column(n, programs) * COLUMNS.value * programs
    return size


def order_statistics(
    x: Tensor, ranks: list[int], wire: Tensor, *, buckets: int, levels: int, magnitude: bool = False
) -> Tensor:
    """The values at these ranks and after each, and with them the wire's header; all is in the scratch memory."""
    n = x.numel()
    programs = programs_on(x.device.index)
    sampled = bool(ranks) and n > DIRECT
    groups = -(-len(ranks) // 3) or 1
    counters = torch.zeros(groups, places.COUNTERS if ranks else 2, dtype=torch.int32, device=x.device)
    scratch = torch.empty(_scratch_floats(n, programs, sampled), dtype=torch.float32, device=x.device)
    size, room = larger_sample(n), slots_per_column(n, programs)
    for i in range(groups):
        group = ranks[3 * i : 3 * i + 3]
        three = (group + 3 * group[-1:] + [0, 0, 0])[:3]
        arguments = (x, n, wire, counters if groups == 1 else counters[i], scratch, *three, 3 * i, levels, size, room)
        constants = (len(group), buckets, i == groups - 1 and not magnitude, sampled, magnitude)
        launch(select_kernel, programs, arguments, constants, **COOPERATIVE)
    return scratch
