"""Sizes in bytes: parsing, formatting, the memory of this process, and checks of that of the machine."""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress
from pathlib import Path

import torch

from thinpipe.options import OptionError

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_LARGE = {"TB": 10**12, "PB": 10**15, "EB": 10**18}  # not accepted as input, but needed in messages about mistakes
_DIGITS = 30  # more than any real size has, and far below the range of a float
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_CONTAINER = Path("/sys/fs/cgroup/memory.max")  # the memory limit of a container
_limits: list[int] = []  # of this process
_STACKS, _LARGE_STACK = 64, 8 << 20  # threads, and bytes of a stack, Linux's default


def parse_size(text: str) -> int:
    """Return the bytes of a size: ``1kB`` and ``1.5MB`` in powers of 1000, ``4GiB`` in powers of 1024."""
    units = _DECIMAL | _BINARY
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(units)})", text.strip().upper())
    if match is None or len(match[1]) > _DIGITS:
        raise ValueError(f"a size is a number with its unit, as in 100kB, 1.5MB or 4GiB; got {text[:40]!r}")
    return int(float(match[1]) * units[match[2]])


def size_text(size: int) -> str:
    """Return a size as text, in powers of 1000."""
    units = _DECIMAL | _LARGE
    unit, count = next(((unit, count) for unit, count in reversed(units.items()) if size >= count), ("B", 1))
    return f"{size / count:.4g} {unit.replace('K', 'k')}"


def memory_bytes(device: str = "cpu") -> int:
    """Return the total memory of this machine, this container, this process (``limit_memory``) or this GPU."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[1])
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such limit, or "max"
        machine = min(machine, int(_CONTAINER.read_text()))
    return min([machine, *_limits])


def limit_memory(size: int, *, by_kernel: bool = True) -> None:
    """Let this process allocate at most ``size`` bytes more than it has now: more is an error of the allocation.

    ``by_kernel=False`` limits ``memory_bytes`` alone, for checks ahead: CUDA reserves more addresses than memory.

    The kernel counts memory that can be written, touched or not (RLIMIT_DATA). It does not count GPU memory, files that
    are mapped, and shared memory. Stacks of threads, which it counts in full and which are hardly touched, are allowed
    for in addition.
    """
    _limits.append(size)
    if not by_kernel:
        return
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    allowed = status_bytes("VmData") + size + _STACKS * (stack if 0 < stack < _LARGE_STACK else _LARGE_STACK)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def free_bytes() -> int:
    """Return the memory of this machine or container that is not in use."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    try:
        return min(free, memory_bytes() - int(_CONTAINER.with_name("memory.current").read_text()))
    except (OSError, ValueError):
        return free


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory of this process so far, on the GPU or resident; None if it cannot be measured."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return status_bytes("VmHWM")
    except (OSError, LookupError):
        return None


def status_bytes(name: str, pid: int | str = "self") -> int:
    """Return a size of /proc/PID/status; raise OSError or LookupError if the system has none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise LookupError(name)


def check_fits(what: str, needed: int, remedy: str, device: str = "cpu") -> None:
    """Raise OptionError if ``needed`` bytes, the least that ``what`` takes, exceed the memory of a device."""
    there = memory_bytes(device)
    if needed > there:
        owner = "this GPU has" if device != "cpu" else "this process may have" if _limits else "this machine has"
        raise OptionError(f"{what} takes {size_text(needed)} or more, and {owner} {size_text(there)}; {remedy}")
