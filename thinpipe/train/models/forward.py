"""A model's own forward with its blocks intercepted: to record their arguments, or to run a part of the model.

    inputs -> [ head ] -> block 0 -> [ glue ] -> block 1 -> ... -> block n-1 -> [ tail ] -> logits

Blocks do not compute here: each call passes the block's arguments to a callback, which returns the block's result or
ends the run. The code between blocks is the model's own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from thinpipe.train.models.symbolic import SymbolicMode, SymbolicValueError, is_symbolic, symbolic_like

OnCall = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class _Reached(Exception):
    pass


@contextmanager
def intercepted(blocks: Sequence[nn.Module], on_call: OnCall) -> Iterator[None]:
    """Redirect calls of the blocks to ``on_call``, with the block's number, and return its result."""

    def replacement(number: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: on_call(number, args, kwargs)

    for number, block in enumerate(blocks):
        # On the instance: other attributes that the model's code reads from a block are still there.
        block.forward = replacement(number)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def call_model(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return the model's logits."""
    options: dict[str, Any] = {"use_cache": False} if takes(model, "use_cache") else {}
    return model(**{**options, **inputs}).logits


def without_cache(model: nn.Module) -> None:
    """Disable the key-value cache: training does not use it."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def run_until(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: Mapping[str, Any], on_call: OnCall, until: int | None
) -> Any:
    """Return the (args, kwargs) of the call of block ``until``, or the logits if that is None."""
    call: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stop_or_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if number == until:
            call.append((args, kwargs))
            raise _Reached
        return on_call(number, args, kwargs)

    with intercepted(blocks, stop_or_call):
        try:
            logits = call_model(model, inputs)
        except _Reached:
            return call[0]
    if until is not None:
        raise ValueError(f"block {until} was not called")
    return logits


@contextmanager
def without_values(
    device: torch.device, on_tensor: Callable[[Tensor], None] | None = None
) -> Iterator[Callable[[], None]]:
    """Run with symbolic tensors, without weights and gradients, until the yielded function is called."""
    gradients, casts_kept = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()

    def as_before() -> None:
        torch.set_grad_enabled(gradients)
        torch.set_autocast_cache_enabled(casts_kept)

    def with_weights() -> None:
        flow.weights = True
        as_before()

    torch.set_grad_enabled(False)
    # Autocast would cache the symbolic cast of a weight and pass it to the block that computes next.
    torch.set_autocast_cache_enabled(False)
    try:
        with SymbolicMode(device, on_tensor) as flow:
            yield with_weights
    finally:
        as_before()


def shapes_returned(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a block returns for symbolic tensors."""
    try:
        return type(block).forward(block, *args, **kwargs)
    except (SymbolicValueError, NotImplementedError, RuntimeError):
        # Its code reads values, as experts do that select their tokens: any values will do, since the shapes of its
        # results do not depend on them. Zeros that are only read take no memory on a CPU.
        device = next(leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if is_symbolic(leaf))

        def zeros(leaf: Any) -> Any:
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if is_symbolic(leaf) else leaf

        weights = {id(each): torch.zeros(each.shape, dtype=each.dtype, device=device) for each in block.parameters()}
        copied = copy.deepcopy(block, weights)
        given, options = pytree.tree_map(zeros, (args, kwargs))
        result = type(block).forward(copied, *given, **options)
        return pytree.tree_map(lambda leaf: symbolic_like(leaf, device) if isinstance(leaf, Tensor) else leaf, result)
