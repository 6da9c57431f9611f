"""A process that ends with the one that started it, also if that was killed."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
# Looked up ahead: also called between fork and exec, where nothing should be loaded. Linux has it.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def end_with_parent() -> None:
    """Get SIGTERM when the process that started this one was killed; torch's own SIGINT would wait for Python."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
