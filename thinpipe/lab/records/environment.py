"""The environment of a measurement: versions, processor, threads, devices and GPU topology."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch


def environment() -> dict[str, object]:
    """Return the versions and hardware that are needed to judge the numbers of a record."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "numba")},
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def gpu_topology() -> str | None:
    """Return the output of ``nvidia-smi topo -m``; None if it is not available."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # headings are underlined even in a pipe
    return plain.strip("\n") if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)  # from the metadata: importing numba would take longer than many runs
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            return next(line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
