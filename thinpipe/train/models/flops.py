"""A FLOP counter for code that runs with symbolic tensors.

Private names of torch used in this module, seen on 2.11 and 2.13: ``FlopCounterMode.mod_tracker``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def flop_counter() -> FlopCounterMode:
    """Return a FLOP counter that also covers grouped matrix products and attention with shared key heads.

    Torch's own counts neither; and it hooks modules to attribute FLOPs, which fails on some models' return values.
    """
    formulas: dict[Any, Any] = {getattr(torch.ops.aten, name): _attention_flops for name in _ATTENTION}
    counter = FlopCounterMode(display=False, custom_mapping={**formulas, torch.ops.aten._grouped_mm: _grouped_flops})
    tracker: Any = nullcontext()
    tracker.parents = ("Global",)  # attribute everything to one module
    counter.mod_tracker = tracker
    return counter


def _grouped_flops(tokens: Sequence[int], experts: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(tokens) * experts[-1]


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
