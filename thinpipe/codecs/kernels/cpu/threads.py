"""Splits a range over as many threads as torch uses; the loops below release the GIL.

numba has its own parallel loops, but its portable thread layer aborts the process when two Python threads enter it,
and its OpenMP layer when a forked process does. A pool of our own has neither fault and follows torch's setting.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch

Result = TypeVar("Result")


@cache
def _pool(process: int, helpers: int) -> ThreadPoolExecutor:
    """One pool per process (threads do not survive a fork), started by the first tensor large enough for it."""
    return ThreadPoolExecutor(helpers, thread_name_prefix="thinpipe-codec")


def parallel(work: Callable[[int, int], Result], count: int, grain: int) -> list[Result]:
    """Call ``work(first, last)`` on parts of range(count), none below ``grain`` long; results in the range's order."""
    parts = max(1, min(torch.get_num_threads(), count // grain))
    if parts == 1:
        return [work(0, count)]
    bounds = [count * i // parts for i in range(parts + 1)]
    others = [_pool(os.getpid(), parts - 1).submit(work, first, last) for first, last in pairwise(bounds[1:])]
    return [work(0, bounds[1]), *(other.result() for other in others)]
