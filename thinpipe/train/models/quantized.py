"""Frozen linear layers of a model's blocks with 4-bit weights (nf4, the type of QLoRA, by bitsandbytes).

A layer is replaced once its weights are loaded, so that a worker holds at most one block unquantized:

    model.layers.0.mlp.up_proj.weight    bfloat16 or float32 [out, in]   ->  uint8, two weights a byte
                                                                             up_proj.absmax  float32, one a 64 weights

It multiplies with the dequantized weight, as bitsandbytes' own layer does. bitsandbytes is imported only when used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinpipe.options import OptionError
from thinpipe.train.models.blocks import candidates
from thinpipe.train.models.symbolic import is_symbolic

BLOCK = 64  # weights with one scale; bitsandbytes' and QLoRA's size
_BYTES = 0.5 + 4 / BLOCK  # of a weight
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels for inference on CPUs


class NF4Linear(nn.Module):
    """A linear layer with a frozen 4-bit weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        codes, absmax = _quantized(layer.weight.detach())
        self.in_features, self.out_features, self.dtype = layer.in_features, layer.out_features, layer.weight.dtype
        # Parameters, not buffers: those are trained state, which checkpoints contain.
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.absmax = nn.Parameter(absmax, requires_grad=False)
        self.bias = layer.bias

    @property
    def dequantized(self) -> Tensor:
        """The weight in the dtype that it had before."""
        return _dequantized(self.weight, self.absmax, self.out_features * self.in_features, self.dtype).view(
            self.out_features, self.in_features
        )

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
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.dequantized.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
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


def quantized_and_back(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return some tensors of a model, by plain name, with the values that its 4-bit layers multiply with."""
    blocks = candidates(model)
    layers = [f"{path}.{name}" for path, block in blocks.items() for name in _linear_names(block)]
    held = {f"{layer.replace('.base_layer', '')}.weight" for layer in layers}
    return {
        name: _dequantized(*_quantized(each), each.numel(), each.dtype).view_as(each) if name in held else each
        for name, each in tensors.items()
    }


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


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales. As one row: on CPUs bitsandbytes 0.50 decodes rows shorter than a block wrongly."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight.reshape(1, -1), blocksize=BLOCK, quant_type="nf4")
    return codes, state.absmax


def _dequantized(codes: Tensor, absmax: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

    code = get_4bit_type("nf4", codes.device)
    state = QuantState(absmax, torch.Size([1, count]), code, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
    return dequantize_4bit(codes, state)


def _linear_names(block: nn.Module) -> list[str]:
    paths = {id(module): path for path, module in block.named_modules()}
    return [f"{paths[id(parent)]}.{name}".removeprefix(".") for parent, name, _ in _frozen_linear(block)]


def _frozen_linear(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the frozen linear layers of a block, with their parents and names."""
    for parent in block.modules():
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear and not layer.weight.requires_grad:
                yield parent, name, layer
