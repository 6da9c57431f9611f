"""The thread pool of the CPU kernels, and the division of tensors among as many threads as torch uses.

The loops release the GIL. numba has its own parallel loops, but its portable thread layer aborts the process when two
Python threads enter it, and its OpenMP layer when a forked process does. A separate pool has neither fault and follows
torch's setting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.layout import BLOCK

Result = TypeVar("Result")

GRAIN = 256  # least blocks per thread: waking a thread costs 0.1 ms


@cache
def _pool(process: int, helpers: int) -> ThreadPoolExecutor:
    """Return the pool of this process (threads do not survive a fork), created for the first large tensor."""
    return ThreadPoolExecutor(helpers, thread_name_prefix="thinpipe-codec")


def split(count: int, grain: int) -> list[tuple[int, int]]:
    """Split range(count) into one (first, last) part per thread, none shorter than ``grain``."""
    parts = max(1, min(torch.get_num_threads(), count // grain))
    return list(pairwise(count * i // parts for i in range(parts + 1)))


def parallel(work: Callable[..., Result], shares: Sequence[tuple[Any, ...]]) -> list[Result]:
    """Return ``[work(*share) for share in shares]``, computed with one thread per share."""
    first, *others = shares
    if not others:
        return [work(*first)]
    pool = _pool(os.getpid(), len(others))
    futures = [pool.submit(work, *share) for share in others]
    return [work(*first), *(future.result() for future in futures)]


def array_of(x: Tensor) -> np.ndarray:
    """Return a contiguous float tensor as a flat array whose dtype identifies its float type (see loops/values.py)."""
    flat = x.reshape(-1)
    if x.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy()
    return flat.view(torch.uint16).numpy() if x.dtype == torch.float16 else flat.numpy()


def shares(x: np.ndarray) -> list[tuple[int, int]]:
    """Return one (first, last) range of the blocks of x for each thread."""
    return split(-(-x.size // BLOCK), GRAIN)


def tile_shares(count: int, tile: int) -> list[tuple[int, int]]:
    """Return one range of units for each thread; a unit is the larger of a tile and a block."""
    unit = max(tile, BLOCK)
    return split(-(-count // unit), GRAIN * BLOCK // unit)
