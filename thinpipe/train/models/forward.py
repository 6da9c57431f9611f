"""A model's own forward, run with its blocks intercepted: to hear what they are called with, or to run a part of it.

    inputs -> [ head ] -> block 0 -> [ glue ] -> block 1 -> ... -> block n-1 -> [ tail ] -> logits

Blocks do not compute here: at each call the run is told what the block is given and what it returned, or ends. What is
between blocks is the model's own code, whatever it does.
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

from thinpipe.train.models.unknown import UnknownFlow, UnknownValueError, is_unknown, unknown_like

OnCall = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class _Reached(Exception):
    pass


@contextmanager
def intercepted(blocks: Sequence[nn.Module], on_call: OnCall) -> Iterator[None]:
    """Calls of the blocks go to ``on_call``, with the block's number, and return what it does."""

    def replacement(number: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: on_call(number, args, kwargs)

    for number, block in enumerate(blocks):
        # On the instance: whatever the model's code asks a block for besides is still there.
        block.forward = replacement(number)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def call_model(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The model's logits."""
    options: dict[str, Any] = {"use_cache": False} if takes(model, "use_cache") else {}
    return model(**{**options, **inputs}).logits


def without_cache(model: nn.Module) -> None:
    """No keys and values kept for tokens to come: in training there are none."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def run_until(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: Mapping[str, Any], on_call: OnCall, until: int | None
) -> Any:
    """The (args, kwargs) of the call of block ``until``, or, if that is None, the logits."""
    call: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def heard(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if number == until:
            call.append((args, kwargs))
            raise _Reached
        return on_call(number, args, kwargs)

    with intercepted(blocks, heard):
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
    """Runs with unknown values, without weights and gradients until the function that this yields is called."""
    gradients, casts_kept = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()

    def as_before() -> None:
        torch.set_grad_enabled(gradients)
        torch.set_autocast_cache_enabled(casts_kept)

    def with_weights() -> None:
        flow.weights = True
        as_before()

    torch.set_grad_enabled(False)
    # Autocast would keep the unknown cast of a weight and give it to the block that computes next.
    torch.set_autocast_cache_enabled(False)
    try:
        with UnknownFlow(device, on_tensor) as flow:
            yield with_weights
    finally:
        as_before()


def shapes_returned(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a block returns for unknown values."""
    try:
        return type(block).forward(block, *args, **kwargs)
    except (UnknownValueError, NotImplementedError, RuntimeError):
        # Its code asks for values, as experts do that take only the tokens meant for them: any values will do, for the
        # shapes of what it returns do not depend on them. Zeros that are only read take no memory on a CPU.
        device = next(leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if is_unknown(leaf))

        def zeros(leaf: Any) -> Any:
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if is_unknown(leaf) else leaf

        weights = {id(each): torch.zeros(each.shape, dtype=each.dtype, device=device) for each in block.parameters()}
        copied = copy.deepcopy(block, weights)
        given, options = pytree.tree_map(zeros, (args, kwargs))
        result = type(block).forward(copied, *given, **options)
        return pytree.tree_map(lambda leaf: unknown_like(leaf, device) if isinstance(leaf, Tensor) else leaf, result)
