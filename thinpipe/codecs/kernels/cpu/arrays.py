"""Conversion of tensors to the flat arrays of the compiled loops, and their division among threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.kernels.cpu.threads import split
from thinpipe.codecs.layout import BLOCK

GRAIN = 256  # least blocks per thread: waking a thread costs 0.1 ms


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
