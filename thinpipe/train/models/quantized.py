"""Frozen linear layers of a model's blocks with 4-bit weights (nf4, the type of QLoRA, by bitsandbytes).

A layer is replaced once its weights are loaded, so that a worker holds at most one block unquantized:

    model.layers.0.mlp.up_proj.weight    bfloat16 or float32 [out, in]   ->  uint8, two weights a byte
                                                                             up_proj.absmax  float32, one a 64 weights

It multiplies with the dequantized weight, as bitsandbytes' own layer does. bitsandbytes is imported only when used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinpipe.options import OptionError
from thinpipe.train.models.symbolic import is_symbolic

BLOCK = 64  # weights with one scale; bitsandbytes' and QLoRA's size
_BYTES = 0.5 + 4 / BLOCK  # of a weight


class NF4Linear(nn.Module):
    """A linear layer with a frozen 4-bit weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(layer.weight.detach(), blocksize=BLOCK, quant_type="nf4")
        self.in_features, self.out_features, self.dtype = layer.in_features, layer.out_features, layer.weight.dtype
        # Parameters, not buffers: those are trained state, which checkpoints contain.
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.absmax = nn.Parameter(state.absmax, requires_grad=False)
        self.bias = layer.bias

    @property
    def dequantized(self) -> Tensor:
        """The weight in the dtype that it had before."""
        from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

        shape, code = torch.Size([self.out_features, self.in_features]), get_4bit_type("nf4", self.weight.device)
        state = QuantState(self.absmax, shape=shape, code=code, blocksize=BLOCK, quant_type="nf4", dtype=self.dtype)
        return dequantize_4bit(self.weight, state)

    def forward(self, x: Tensor) -> Tensor:
        if is_symbolic(x):
            return x.new_empty((*x.shape[:-1], self.out_features))
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        product: Tensor = _Product.apply(x, self)
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """Multiplication with a 4-bit weight, which backward dequantizes again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        return functional.linear(x, layer.dequantized.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient @ ctx.layer.dequantized.to(gradient.dtype), None


def check_installed() -> None:
    """Raise OptionError without bitsandbytes."""
    if find_spec("bitsandbytes") is None:
        raise OptionError("{quantize} nf4 needs bitsandbytes, which is not installed: pip install 'thinpipe[nf4]'")


def quantize(block: nn.Module) -> None:
    """Replace the frozen linear layers of a block, whose weights are loaded, in place."""
    for parent, name, layer in list(_frozen_linear(block)):
        setattr(parent, name, NF4Linear(layer))


def saved_bytes(blocks: Iterable[nn.Module]) -> int:
    """Return the bytes that these blocks, quantized or on the meta device, take less than before."""
    layers = (layer.weight for block in blocks for _, _, layer in _frozen_linear(block))
    return sum(round(each.numel() * (each.element_size() - _BYTES)) for each in layers)


def dequantize(module: nn.Module) -> None:
    """Replace all 4-bit layers of a module by linear layers with the weights that they multiply with, in place."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, NF4Linear):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
                plain.weight, plain.bias = nn.Parameter(layer.dequantized, requires_grad=False), layer.bias
                setattr(parent, name, plain)


def plain_tensors(tensors: Mapping[str, Tensor], modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of modules as ``dequantize`` will leave them: for 4-bit weights, their shapes and dtypes."""
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, NF4Linear)]
    weights = {id(layer.weight): layer for layer in layers}
    scales = {id(layer.absmax) for layer in layers}

    def plain(tensor: Tensor) -> Tensor:
        layer = weights.get(id(tensor))
        if layer is None:
            return tensor
        return torch.empty(layer.out_features, layer.in_features, dtype=layer.dtype, device="meta")

    return {name: plain(each) for name, each in tensors.items() if id(each) not in scales}


def _frozen_linear(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the frozen linear layers of a block, with their parents and names."""
    for parent in block.modules():
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear and not layer.weight.requires_grad:
                yield parent, name, layer
