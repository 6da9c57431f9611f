"""The thread pool of the CPU kernels: splits a range over as many threads as torch uses; the loops release the GIL.

numba has its own parallel loops, but its portable thread layer aborts the process when two Python threads enter it,
and its OpenMP layer when a forked process does. A separate pool has neither fault and follows torch's setting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


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
