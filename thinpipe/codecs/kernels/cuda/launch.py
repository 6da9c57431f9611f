"""Launches a kernel, the second time and later without Triton's own binding of arguments, which takes longer."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)  # Triton's interpreter on the CPU, for tests

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], **options: Any) -> None:
    """Run ``programs`` programs of a kernel on the device of its first argument, on the current stream."""
    if INTERPRETED:
        kernel[(programs,)](*arguments, *constants)
        return
    device = arguments[0].device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, programs, arguments, constants, **options)
    key = (id(kernel), device.index, constants, *map(_kind, arguments))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*arguments, *constants, **options)
    else:
        compiled[(programs, 1, 1)](*arguments, *constants)


def _kind(argument: Tensor | int) -> Any:
    """What Triton compiles another kernel for: types, alignment, how wide a number is."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument == 1, argument % 16 == 0, argument >= 1 << 31
