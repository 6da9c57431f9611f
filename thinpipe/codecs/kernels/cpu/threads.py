"""Splits a range over as many threads as torch uses; the loops below release the GIL.

numba has its own parallel loops, but its portable thread layer aborts the process when two Python threads enter it,
and its OpenMP layer when a forked process does. A pool of our own has neither fault and follows torch's setting.
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
    """One pool per process (threads do not survive a fork), started by the first tensor large enough for it."""
    return ThreadPoolExecutor(helpers, thread_name_prefix="thinpipe-codec")


def split(count: int, grain: int) -> list[tuple[int, int]]:
    """range(count) in as many (first, last) parts as there are threads, none shorter than ``grain``."""
    parts = max(1, min(torch.get_num_threads(), count // grain))
    return list(pairwise(count * i // parts for i in range(parts + 1)))


def parallel(work: Callable[..., Result], shares: Sequence[tuple[Any, ...]]) -> list[Result]:
    """``[work(*share) for share in shares]``, a thread for each share."""
    first, *others = shares
    if not others:
        return [work(*first)]
    pool = _pool(os.getpid(), len(others))
    futures = [pool.submit(work, *share) for share in others]
    return [work(*first), *(future.result() for future in futures)]
