"""The layout of a safetensors file: known before its tensors are, so that it can be written piece by piece."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

# What safetensors calls them.
_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class TensorFile:
    """Where everything is in a file of these tensors, of which only shapes and types count: a header, then values."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        # The widest first, so that each lies at a multiple of its width.
        self.names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        described: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
        starts, end = {}, 0
        for name in self.names:
            tensor = tensors[name]
            starts[name], end = end, end + tensor.numel() * tensor.element_size()
            offsets = [starts[name], end]
            described[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.bytes = len(self.header) + end
        self._starts = starts

    def offset(self, name: str) -> int:
        """Where the values of a tensor begin."""
        return len(self.header) + self._starts[name]
