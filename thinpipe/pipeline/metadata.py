"""Shapes of tensors before the first step: those that torch's stages expect, and those that they exchange.

They are exchanged as JSON: torch would send pickles. Private names of torch used here: ``buffer`` and ``input_name`` of
a receive info, seen on 2.11 and 2.13, and its ``tensor_meta`` (2.13), with ``requires_grad`` of an input;
``_StageMeta`` (2.13), the shapes of the examples that a stage was given; ``_TensorMeta``, ``_StageForwardMeta`` and
``_StageBackwardMeta`` (2.13), which ``_send_meta`` and ``_recv_meta`` carry.
torch 2.11 has none of those and no hook for this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import _utils

from thinpipe.system.tensors import dtype_name, dtype_named

# True if shapes can be inferred without pickles; otherwise stages must be given their shapes.
CAN_INFER = hasattr(_utils, "_StageForwardMeta")


@dataclass(frozen=True)
class Expected:
    """A tensor that torch expects from a neighbour for every chunk."""

    shape: torch.Size
    dtype: torch.dtype
    gradient: bool  # a gradient is sent back, or this is a gradient

    @staticmethod
    def of(info: Any, trained: bool) -> Expected:
        """Return what a receive info expects; ``trained``: whether any stage is trained that produces the tensor."""
        if info.buffer is None:  # torch 2.13: this output has no gradient
            return Expected(torch.Size(), torch.uint8, False)
        meta = getattr(info, "tensor_meta", None)  # torch 2.13; before, every input had a gradient
        differentiable = info.buffer.is_floating_point() or info.buffer.is_complex()
        is_gradient = info.input_name.startswith("recv_grad")
        wanted = trained and differentiable and (meta is None or is_gradient or meta.requires_grad)
        return Expected(info.buffer.shape, info.buffer.dtype, wanted)

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def expect_gradients(examples: Any, *, inputs: bool, outputs: bool) -> None:
    """Mark inputs or outputs as requiring gradients if none of their examples does.

    Examples are usually chunks of data, which require no gradient. ``examples`` is a ``_StageMeta``.
    """
    for name, trained in (("inputs", inputs), ("outputs", outputs)):
        metas = getattr(examples, name)
        if trained and metas and not any(meta.requires_grad for meta in metas):
            differentiable = [meta.dtype.is_floating_point or meta.dtype.is_complex for meta in metas]
            pairs = zip(metas, differentiable, strict=True)
            setattr(examples, name, tuple(replace(meta, requires_grad=grad) for meta, grad in pairs))


def to_json(meta: Any) -> dict[str, Any]:
    """Return a ``_StageForwardMeta`` or ``_StageBackwardMeta`` as JSON."""
    forward = isinstance(meta, _utils._StageForwardMeta)
    metas = meta.forward_metas if forward else meta.backward_metas
    return {"forward": forward, "tensors": [None if each is None else _tensor(each) for each in metas]}


def from_json(record: dict[str, Any]) -> Any:
    metas: Any = tuple(None if each is None else _meta(*each) for each in record["tensors"])
    return _utils._StageForwardMeta(metas) if record["forward"] else _utils._StageBackwardMeta(metas)


def _tensor(meta: Any) -> list[Any]:
    if type(meta) is not _utils._TensorMeta:
        raise ValueError(
            f"stages find the shapes of plain tensors by themselves, got {type(meta).__name__}; "
            "give the stage its shapes, as input_args and output_args"
        )
    return [list(meta.shape), list(meta.stride), dtype_name(meta.dtype), meta.requires_grad]


def _meta(shape: list[int], stride: list[int], dtype: str, requires_grad: bool) -> Any:
    return _utils._TensorMeta(torch.Size(shape), tuple(stride), dtype_named(dtype), bool(requires_grad))
