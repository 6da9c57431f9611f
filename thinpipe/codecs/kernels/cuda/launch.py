"""Launches of kernels, from the second one on without Triton's own binding of arguments, which takes longer.

Missing kernels are compiled immediately: all of one call in parallel threads, and each kernel by one process of a
machine. The other processes wait, and then load it from Triton's cache on disk.

Not in Triton's documentation, as of 3.7: ``JITFunction.warmup``, the ``run``, ``function`` and ``packed_metadata`` of a
compiled kernel, ``knobs.runtime.interpret``, ``knobs.cache.dir``.
"""

import contextlib
import fcntl
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)  # Triton's interpreter on the CPU, for tests
SILENT_S = 1.0  # delay of the message: kernels in Triton's cache are loaded sooner
INT32 = (1 << 31) - 1
LOCKS = 64  # lock files: two kernels that share one are compiled one after the other

_compiled: dict[tuple[Any, ...], Any] = {}


class Launch(NamedTuple):
    """A launch of ``programs`` programs of a kernel. Its first argument is a tensor; constants follow the others."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012, never changed


def launch(*launches: Launch) -> None:
    """Run kernels one after the other on the device of their first argument, on the current stream."""
    if INTERPRETED:
        for each in launches:
            each.kernel[(each.programs,)](*each.arguments, *each.constants)
        return
    device = launches[0].arguments[0].device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(*launches)
    bound = [_bind(each, device.index) for each in launches]
    missing = {key: each for (key, _), each in zip(bound, launches, strict=True) if key not in _compiled}
    if missing:
        _compile(missing, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    for (key, values), each in zip(bound, launches, strict=True):
        kernel = _compiled[key]
        no_hooks = (None, None, None)
        kernel.run(
            each.programs, 1, 1, stream, kernel.function, kernel.packed_metadata, *no_hooks, *values, *each.constants
        )


def _bind(each: Launch, device: int) -> tuple[tuple[Any, ...], list[int]]:
    """Return the key that a kernel is compiled for, and its arguments, with addresses in place of tensors."""
    key: list[Any] = [id(each.kernel), device, each.constants, each.options.get("maxnreg")]
    values = []
    for argument in each.arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            key += (argument.dtype, address % 16 == 0)
            values.append(address)
        else:  # types depend on the size of a number; Triton specializes kernels for 1 and multiples of 16
            key.append(1 if argument == 1 else 2 * (argument % 16 == 0) + 4 * (argument > INT32))
            values.append(argument)
    return tuple(key), values


def _compile(launches: dict[tuple[Any, ...], Launch], device: torch.device) -> None:
    def compiled(each: Launch) -> Any:
        with torch.cuda.device(device), _alone(each):  # every thread has a current device of its own
            return each.kernel.warmup(*each.arguments, *each.constants, grid=(each.programs,), **each.options)

    names = ", ".join(each.kernel.__name__ for each in launches.values())
    with _announce_if_slow(names), ThreadPoolExecutor(len(launches)) as pool:
        _compiled.update(zip(launches, pool.map(compiled, launches.values()), strict=True))


@contextlib.contextmanager
def _announce_if_slow(names: str) -> Iterator[None]:
    line = f"thinpipe: compiling for the GPU, once on this machine: {names}"
    timer = threading.Timer(SILENT_S, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _alone(each: Launch) -> Iterator[None]:
    """Hold a file lock, so that no other process of the machine compiles the same kernel.

    Where nothing can be written there is no lock, and processes compile in parallel.
    """
    what = repr((each.kernel.__name__, _bind(each, 0)[0][1:]))
    number = zlib.crc32(what.encode()) % LOCKS
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = Path(triton.knobs.cache.dir)
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / f"thinpipe-{number}.lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield
