"""What torch's stages tell each other about shapes before the first step, as JSON: torch would send pickles.

Private names of torch 2.13 used here: ``_TensorMeta``, ``_StageForwardMeta`` and ``_StageBackwardMeta``, which is what
its ``_send_meta`` and ``_recv_meta`` carry. torch 2.11 has none of them and offers no place to put this in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import _utils

# Whether shapes can be found without pickles; otherwise stages must be told them.
CAN_INFER = hasattr(_utils, "_StageForwardMeta")


def to_json(meta: Any) -> dict[str, Any]:
    """``_StageForwardMeta`` or ``_StageBackwardMeta``."""
    forward = isinstance(meta, _utils._StageForwardMeta)
    metas = meta.forward_metas if forward else meta.backward_metas
    return {"forward": forward, "tensors": [None if each is None else _tensor(each) for each in metas]}


def from_json(told: dict[str, Any]) -> Any:
    metas: Any = tuple(None if each is None else _meta(*each) for each in told["tensors"])
    return _utils._StageForwardMeta(metas) if told["forward"] else _utils._StageBackwardMeta(metas)


def _tensor(meta: Any) -> list[Any]:
    if type(meta) is not _utils._TensorMeta:
        raise ValueError(
            f"stages find the shapes of plain tensors by themselves, got {type(meta).__name__}; "
            "give the stage its shapes, as input_args and output_args"
        )
    return [list(meta.shape), list(meta.stride), str(meta.dtype).removeprefix("torch."), meta.requires_grad]


def _meta(shape: list[int], stride: list[int], dtype: str, requires_grad: bool) -> Any:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"the neighbour sends tensors of a type that torch does not know: {dtype!r}")
    return _utils._TensorMeta(torch.Size(shape), tuple(stride), found, bool(requires_grad))
