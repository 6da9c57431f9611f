"""Code of a model that only calls modules one after the other, as a norm and a head: found once, then called directly.

To run the model's own forward for it takes milliseconds of Python, and on a GPU it waits for the device. A module
follows another if its argument is the very memory that the other returned, unchanged since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.train.models.symbolic import is_symbolic


@dataclass(frozen=True)
class Chain:
    """Modules in call order; ``positions`` are selected before the one of this number."""

    modules: tuple[nn.Module, ...]
    sliced: int | None

    def __call__(self, states: Tensor, positions: slice | None) -> Tensor:
        for number, module in enumerate(self.modules):
            states = module(states[:, positions] if number == self.sliced else states)
        return states


@dataclass(frozen=True)
class _Called:
    module: nn.Module
    given: Any
    given_version: int
    returned: Any
    returned_version: int


def key_of(states: Tensor, positions: slice | None, training: bool) -> tuple[Any, ...]:
    """Return what the code may depend on, apart from values."""
    return (states.shape[1:], states.dtype, positions is None, training, torch.is_autocast_enabled(states.device.type))


@contextmanager
def recorded(modules: Iterable[nn.Module]) -> Iterator[list[_Called]]:
    """Record the calls of these modules with tensors that have values."""
    calls: list[_Called] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if len(args) == 1 and not kwargs else None
        if any(isinstance(each, Tensor) and not is_symbolic(each) for each in (*args, *kwargs.values())):
            calls.append(_Called(module, given, _version(given), output, _version(output)))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def chain_of(
    calls: Sequence[_Called], states: Tensor, version: int, positions: slice | None, result: Tensor
) -> Chain | None:
    """Return the chain that computed ``result`` from ``states``, of that version; None if other code took part."""
    sliced, before = None, states
    for number, call in enumerate(calls):
        if not isinstance(call.given, Tensor) or call.given_version != version or not isinstance(call.returned, Tensor):
            return None
        if not _is_same(call.given, before):
            if positions is None or sliced is not None or not _is_same(call.given, before[:, positions]):
                return None
            sliced = number
        before, version = call.returned, call.returned_version
    if not calls or not _is_same(before, result) or result._version != version:
        return None
    return Chain(tuple(call.module for call in calls), sliced) if (sliced is None) == (positions is None) else None


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are the same values in the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
