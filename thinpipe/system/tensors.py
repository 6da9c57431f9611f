"""Shapes and dtypes of tensors as JSON: ``[[2, 3], "float32"]``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Spec = list[Any]  # shape and dtype, as JSON


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name; raise ValueError if torch has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a tensor has a dtype of torch, as in float32; got {name[:40]!r}")
    return found


def spec_of(tensor: Any) -> Spec:
    """Return shape and dtype of a tensor, or of anything that has both."""
    return [list(tensor.shape), dtype_name(tensor.dtype)]


def specs_of(tensors: Mapping[str, Any]) -> dict[str, Spec]:
    return {name: spec_of(tensor) for name, tensor in tensors.items()}


def empty_tensor(spec: Spec) -> Tensor:
    """Return a CPU tensor of a shape and dtype with arbitrary values."""
    shape, dtype = spec
    return torch.empty(shape, dtype=dtype_named(dtype))


def spec_bytes(spec: Spec) -> int:
    """Return the size in bytes of a tensor of a shape and dtype."""
    shape, dtype = spec
    return math.prod(shape) * dtype_named(dtype).itemsize
