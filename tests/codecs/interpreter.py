"""Triton's interpreter without its detours: what kernels compute in it is the same, four times as fast.

Names of ``triton.runtime.interpreter`` as of Triton 3.7, where every call of a kernel's function wraps all of the
language once more, every operation makes a table of all types, and reductions and scans go from value to value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

_wrap: Callable[[Any], Any] = interpreter._patch_lang
_numpy_type: Callable[[Any], np.dtype[Any]] = interpreter._get_np_dtype
_wrapped: set[Any] = set()
_types: dict[str, np.dtype[Any]] = {}


def _wrap_once(function: Any) -> interpreter._LangPatchScope:
    """For good: nothing in this process compiles kernels."""
    modules = {each for each in function.__globals__.values() if each is tl or each is tl.core}
    if not modules <= _wrapped:
        _wrapped.update(modules)
        _wrap(function)
    return interpreter._LangPatchScope()


def _known_type(kind: Any) -> np.dtype[Any]:
    if isinstance(kind, tl.block_type):
        kind = kind.element_ty
    if kind.name not in _types:
        _types[kind.name] = _numpy_type(kind)
    return _types[kind.name]


def _combined(self: Any, left: list[Any], right: list[Any], arguments: Any) -> list[Any]:
    """Arrays combined value by value, in one call."""
    pairs = zip([*left, *right], [*arguments, *arguments], strict=True)
    result = self.combine_fn.fn(*(self.to_tensor(array, each.dtype) for array, each in pairs))
    return [each.handle.data for each in (result if isinstance(result, tuple) else (result,))]


def _reduce(self: Any, arguments: Any) -> list[Any]:
    """Every second value with the one before, until one is left: blocks have powers of two."""
    assert self.axis is not None or not self.keep_dims, "not written, as no kernel needs it"
    arguments, axis = self.unravel(arguments, self.axis)
    arrays = [np.moveaxis(each.handle.data, axis, 0) for each in arguments]
    while len(arrays[0]) > 1:
        shape = arrays[0][::2].shape
        found = _combined(self, [array[::2] for array in arrays], [array[1::2] for array in arrays], arguments)
        arrays = [array.reshape(shape) for array in found]
    if self.keep_dims:
        arrays = [np.moveaxis(array, 0, axis) for array in arrays]
    else:
        arrays = [array[0] if array[0].shape else array[0].item() for array in arrays]
    return [self.to_tensor(array, each.dtype) for array, each in zip(arrays, arguments, strict=True)]


def _scan(self: Any, arguments: Any) -> list[Any]:
    """Every value with the one before, then results with those two before, four before."""
    arrays = [np.moveaxis(each.handle.data, self.axis, 0).copy() for each in arguments]
    step = 1
    while step < len(arrays[0]):
        # A block turned by a step: its first values are not looked at.
        found = _combined(self, [np.roll(array, step, axis=0) for array in arrays], arrays, arguments)
        for array, each in zip(arrays, found, strict=True):
            array[step:] = each[step:]
        step *= 2
    pairs = zip(arrays, arguments, strict=True)
    return [self.to_tensor(np.moveaxis(array, 0, self.axis), each.dtype) for array, each in pairs]


def speed_up() -> None:
    interpreter._patch_lang = _wrap_once
    interpreter._get_np_dtype = _known_type
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter.ScanOps.generic_scan = _scan
