"""Tensors as the flat arrays that loops know, and the shares of them that threads take."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.kernels.cpu.threads import split
from thinpipe.codecs.layout import BLOCK

GRAIN = 256  # blocks a thread must have: waking it costs a tenth of a millisecond


def array_of(x: Tensor) -> np.ndarray:
    """A contiguous float tensor as the flat array that the loops know its type by."""
    flat = x.reshape(-1)
    if x.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy()
    return flat.view(torch.uint16).numpy() if x.dtype == torch.float16 else flat.numpy()


def shares(x: np.ndarray) -> list[tuple[int, int]]:
    """The blocks of x as one (first, last) share for each thread."""
    return split(-(-x.size // BLOCK), GRAIN)


def tile_shares(count: int, tile: int) -> list[tuple[int, int]]:
    """The units of the tile loops, which are whole tiles and whole blocks, as one share for each thread."""
    unit = max(tile, BLOCK)
    return split(-(-count // unit), GRAIN * BLOCK // unit)
