"""Symbolic tensors: shape, dtype and device are known, values are not.

A worker that holds a few blocks of a model has neither its tokens nor the weights of the rest. It still runs the
model's own forward, to find the arguments of its blocks: missing weights are on the meta device, tensors that depend on
tokens are symbolic (``SymbolicTensor``), and so is every result computed from either. Everything else, masks and
positions for instance, is computed as usual. So no argument of a block can silently be invented.

Private names of torch used in this module, seen on 2.11 and 2.13: ``_make_wrapper_subclass``, ``_python_dispatch`` and
``_pytree``, which torch's own tensor subclasses use; a module's ``_parameters`` and ``_buffers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_aten: Any = torch.ops.aten
# Their results do not depend on the values of their arguments.
_KNOWN_ANYWAY = {
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}

_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}


class SymbolicValueError(RuntimeError):
    """The model's code reads a value that this worker does not have."""


class SymbolicTensor(Tensor):
    """A tensor without values that reports a device."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> SymbolicTensor:
        made = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device, requires_grad=False
        )
        made.meta = meta
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SymbolicTensor({self.dtype}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return propagate(func, args, kwargs or {})


# Storage -> a tensor that was known until symbolic values were written into it; kept alive, so that its address is not
# reused.
_written: dict[int, Tensor] = {}


def is_symbolic(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    return isinstance(value, SymbolicTensor) or value.is_meta or bool(_written and _storage(value) in _written)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def symbolic(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return SymbolicTensor(torch.empty(shape, dtype=dtype, device="meta"), device)


def symbolic_like(tensor: Tensor, device: torch.device) -> Tensor:
    return symbolic(tensor.shape, tensor.dtype, device)


class SymbolicMode(TorchDispatchMode):
    """A dispatch mode for a forward: operations on missing weights return symbolic tensors instead of failing."""

    weights = False  # True: weights on this worker count as known

    def __init__(self, device: torch.device, on_tensor: Callable[[Tensor], None] | None = None) -> None:
        """``on_tensor`` is called with every tensor argument of an operation."""
        super().__init__()
        self.device, self._on_tensor = device, on_tensor

    def __exit__(self, *error: Any) -> None:
        _written.clear()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._on_tensor is not None:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._on_tensor(leaf)
        return propagate(func, args, kwargs or {}, self.device, self.weights)


def propagate(func: Any, args: Any, kwargs: Any, device: torch.device | None = None, weights: bool = True) -> Any:
    """Run one operation normally if all its tensors are known, otherwise on the meta device for the result's shapes."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not any(is_symbolic(tensor) or (not weights and isinstance(tensor, nn.Parameter)) for tensor in tensors):
        return func(*args, **kwargs)
    claimed = next((leaf.device for leaf in tensors if not leaf.is_meta), device or torch.device("cpu"))
    if func in _KNOWN_ANYWAY:
        return _known(func, args, kwargs, claimed)
    if func is _aten._local_scalar_dense.default or func is _aten.item.default:
        raise SymbolicValueError("a value that depends on tokens or on weights decides what is computed")
    if func in _INDEXED:  # a known mask: the number of selected elements is known too
        args = (args[0], _without_masks(args[1]), *args[2:])
        leaves, structure = pytree.tree_flatten((args, kwargs))
    requested = kwargs.get("device")
    if isinstance(requested, torch.device):
        claimed = requested
    # Numbers with their type, since 1 == 1.0 == True.
    described = (_Shape.of(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
    key = (func, structure, tuple(described))
    known = _results.get(key)
    if known is not None:
        return pytree.tree_map(lambda each: each.made(claimed) if isinstance(each, _Shape) else each, known)
    metas, meta_kwargs = pytree.tree_map(_to_meta, (args, kwargs))
    if requested is not None:
        meta_kwargs["device"] = torch.device("meta")
    result = func(*metas, **meta_kwargs)
    _note_writes(func, args, kwargs)
    # A tensor changed in place stays the same object; its values are symbolic from now on.
    same = {id(meta): leaf for meta, leaf in zip(pytree.tree_leaves((metas, meta_kwargs)), leaves, strict=False)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        before = same.get(id(value))
        if before is not None:
            return before
        return SymbolicTensor(value, claimed)

    wrapped = pytree.tree_map(wrap, result)
    if not func._schema.is_mutable and not any(
        each is leaf for each in pytree.tree_leaves(wrapped) for leaf in tensors
    ):
        if len(_results) >= _MOST_RESULTS:
            _results.clear()
        _results[key] = pytree.tree_map(lambda each: _Shape.of(each) if isinstance(each, Tensor) else each, result)
    return wrapped


@dataclass(frozen=True)
class _Shape:
    """The properties of a tensor that the shape of a result can depend on."""

    size: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> _Shape:
        return _Shape(tensor.shape, tensor.stride(), tensor.dtype)

    def made(self, device: torch.device) -> SymbolicTensor:
        return SymbolicTensor(torch.empty_strided(self.size, self.strides, dtype=self.dtype, device="meta"), device)


# Cache of the results of operations without side effects, by their arguments: torch takes a fraction of a millisecond
# to infer them in Python, and every chunk runs the same hundreds. Cleared when full: growing texts add new entries.
_results: dict[Any, Any] = {}
_MOST_RESULTS = 10_000


def _without_masks(indices: Any) -> list[Any]:
    made: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool and not is_symbolic(index)
        made += index.nonzero(as_tuple=True) if is_mask else [index]
    return made


def _note_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Mark known tensors that symbolic values are written into, and all their views, as symbolic."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in pytree.tree_leaves(given):
                if isinstance(tensor, Tensor) and not isinstance(tensor, SymbolicTensor) and not tensor.is_meta:
                    _written[_storage(tensor)] = tensor


def _to_meta(value: Any) -> Any:
    if isinstance(value, SymbolicTensor):
        return value.meta
    return value.to("meta") if isinstance(value, Tensor) else value


def _known(func: Any, args: Any, kwargs: Any, device: torch.device) -> Tensor:
    """Return a constant tensor with the shape, dtype and device of the symbolic one, or the requested device."""
    first, *rest = args
    like = torch.empty((), dtype=first.dtype, device=kwargs.get("device") or device).expand(first.shape)
    return func(like, *rest, **{name: value for name, value in kwargs.items() if name != "device"})
