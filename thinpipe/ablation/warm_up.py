"""Kernels compiled once, ahead: otherwise the first runs all do it, and their speed is that of a compiler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinpipe.ablation.plan import Run
from thinpipe.pipeline.links.spec import encoding

_VALUES = 1 << 16  # enough that codecs take the way of large tensors


def compile_kernels(runs: Sequence[Run]) -> None:
    """Encode and decode once with every codec of the runs; what numba compiles for that stays in its cache on disk."""
    x = torch.randn(16, 16, _VALUES // 256, generator=torch.Generator().manual_seed(0))
    for spec in {str(run.settings[f"compress_{side}"]) for run in runs for side in ("forward", "backward")}:
        for used in encoding(spec).codecs:
            used.decode(used.encode(x), torch.empty_like(x))
