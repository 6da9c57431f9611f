"""Measurement of the time and extra memory of a call: warm-up, synchronised repeats, percentiles."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from thinpipe.system.sizes import status_bytes

_CPU = torch.device("cpu")

# glibc's mallopt: blocks from the threshold on are mapped one by one, and go back to the system when freed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_MEASURING = 64 * 1024
_MMAP_THRESHOLD_CEILING = 32 * 1024 * 1024  # the value of glibc's dynamic threshold after large blocks were freed


@dataclass(frozen=True)
class Times:
    """The durations of repeated calls."""

    samples_ms: tuple[float, ...]

    def percentile_ms(self, percent: float) -> float:
        return float(np.percentile(self.samples_ms, percent))

    @property
    def median_ms(self) -> float:
        return self.percentile_ms(50)

    @property
    def p95_ms(self) -> float:
        return self.percentile_ms(95)


def time_calls(
    call: Callable[[], object],
    *,
    repeat: int = 20,
    budget_s: float = 0.25,
    compiles: bool = False,
    device: torch.device = _CPU,
    between: Callable[[], object] | None = None,
) -> Times:
    """Time a call until it ran ``repeat`` times or for ``budget_s`` seconds, whichever comes first.

    The first call warms up and does not count, unless it alone outlasts the budget: a call that takes seconds has
    nothing to warm up, and running it twice would only double the wait. A call that ``compiles`` first
    may take seconds for that alone: then the first call never counts. On a GPU as ``time_iterations``.
    """
    first_ms = elapsed_ms(call, device=device)
    if first_ms > 1e3 * budget_s and not compiles:
        return Times((first_ms,))
    if device.type == "cuda":
        warm_ms = elapsed_ms(call, device=device)
        iterations = max(1, min(repeat, int(1e3 * budget_s / warm_ms)))
        return time_iterations(call, iterations=iterations, device=device, between=between)
    samples: list[float] = []
    while len(samples) < repeat and (not samples or sum(samples) < 1e3 * budget_s):
        samples.append(elapsed_ms(call, device=device))
    return Times(tuple(samples))


def time_iterations(
    call: Callable[[], object],
    *,
    iterations: int,
    device: torch.device = _CPU,
    between: Callable[[], object] | None = None,
) -> Times:
    """Time consecutive calls, like the iterations of a training loop.

    On a GPU with CUDA events and without synchronization in between, which would add launch times that are otherwise
    hidden. ``between``: GPU work before each call that is not counted, repeated until the host has launched the call
    before the GPU reaches it, as if the GPU were the bottleneck. The host's time is ``launch_ms``.
    """
    if device.type != "cuda":
        return Times(tuple(elapsed_ms(call, device=device) for _ in range(iterations)))
    times = 0 if between is None else 1 + math.ceil(2 * launch_ms(call, device) / elapsed_ms(between, device=device))
    marks = []
    stop = _mark()
    for _ in range(iterations):
        start = stop
        if between is not None:
            for _ in range(times):
                between()
            start = _mark()
        call()
        stop = _mark()
        marks.append((start, stop))
    torch.cuda.synchronize(device)
    return Times(tuple(start.elapsed_time(stop) for start, stop in marks))


def launch_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the time until a call returns on the host, without waiting for the device: the median of nine."""
    taken = []
    for _ in range(9):
        _synchronize(device)
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    _synchronize(device)
    return sorted(taken)[len(taken) // 2]


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def flush_caches(device: torch.device) -> Callable[[], object]:
    """Return a function that flushes a GPU's caches: it writes four times the size of the L2 cache."""
    spare = torch.empty(4 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    return spare.zero_


def peak_extra_bytes(call: Callable[[], object], *, device: torch.device = _CPU) -> int | None:
    """Return the peak memory of a call beyond the memory held before it; None if it cannot be measured.

    Run the call once before: permanent allocations of a first call (thread stacks, compiled code) are not working
    memory. On a CPU accurate to about 1 MB: the kernel sums per-core counters only now and then.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    resident = _reset_peak_bytes()
    try:
        call()
        return None if resident is None else max(0, status_bytes("VmHWM") - resident)
    finally:
        _set_mmap_threshold(_MMAP_THRESHOLD_CEILING)


def elapsed_ms(call: Callable[[], object], *, device: torch.device = _CPU) -> float:
    """Return the time of one call until the device has completed it."""
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    """Wait until a device has completed all queued work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak_bytes() -> int | None:
    """Reset the peak memory of the process to its resident memory, and return that; None if it cannot be reset."""
    try:
        # Freed heap that the allocator keeps is still resident: a call that reuses it would seem to need no memory, and
        # one that alternates between freeing and allocating would seem to hold both.
        _set_mmap_threshold(_MMAP_THRESHOLD_MEASURING)
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as clear_refs:
            clear_refs.write("5")  # the kernel's code to reset VmHWM to VmRSS
        return status_bytes("VmRSS")
    except (AttributeError, OSError, LookupError):  # not glibc; not Linux; a kernel without these counters
        return None


def _set_mmap_threshold(threshold_bytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, threshold_bytes)
        mallopt(_M_TRIM_THRESHOLD, 2 * threshold_bytes)
