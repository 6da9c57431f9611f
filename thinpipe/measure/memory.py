"""Whether what is asked for fits into memory: told before it is allocated, not by the kernel that kills for it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from thinpipe.measure.sizes import size_text
from thinpipe.options import OptionError

_CONTAINER = Path("/sys/fs/cgroup/memory.max")  # in a container: what it may have


def memory_bytes(device: str = "cpu") -> int:
    """What this machine, this container or this GPU can give at the most."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[1])
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_CONTAINER.read_text()))
    except (OSError, ValueError):  # no such limit, or "max"
        return machine


def check_fits(what: str, needed: int, remedy: str, device: str = "cpu") -> None:
    """OptionError if ``needed`` bytes, of which ``what`` takes no less, are more than there are."""
    there = memory_bytes(device)
    if needed > there:
        owner = "this machine" if device == "cpu" else "this GPU"
        raise OptionError(f"{what} takes {size_text(needed)} or more, and {owner} has {size_text(there)}; {remedy}")
