"""The inner loops of the codecs: one module per machine, with the same names and signatures in each."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch

_BY_DEVICE = {"cpu": "cpu", "cuda": "cuda"}


def select(name: str, device: torch.device) -> ModuleType:
    """The kernels that run on a device, or the plain torch ones for ``"reference"``.

    Imported on first use: numba takes longer to import than everything else in thinpipe together.
    """
    if name == "reference":
        return importlib.import_module(f"{__name__}.reference")
    if name != "auto":
        raise ValueError(f"kernels are 'auto' or 'reference', got {name!r}")
    module = _BY_DEVICE.get(device.type)
    if module == "cuda" and importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            "codec kernels for GPUs are written in Triton, which is not installed: pip install triton, of the release "
            f"that fits torch {torch.__version__}; or move the tensor to the CPU, or ask for kernels='reference' (slow)"
        )
    if module is None:
        raise RuntimeError(
            f"there are no codec kernels for device {device.type!r}, only for {', '.join(_BY_DEVICE)}; "
            "move the tensor, or ask for kernels='reference' (slow)"
        )
    return importlib.import_module(f"{__name__}.{module}")
