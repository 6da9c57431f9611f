"""How the GPUs of this machine are joined, in the words of its driver."""

from __future__ import annotations

import re
import shutil
import subprocess


def gpu_topology() -> str | None:
    """What ``nvidia-smi topo -m`` prints; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # it underlines headings even where nobody looks
    return plain.strip("\n") if done.returncode == 0 else None
