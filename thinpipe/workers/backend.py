"""Which backend of a process group carries the tensors of a device, and where these must be for it."""

from __future__ import annotations

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """``"gloo"``, ``"nccl"`` ...; a group may have one per kind of device (``"cpu:gloo,cuda:nccl"``)."""
    config = str(dist.get_backend_config(group))
    return dict(part.split(":") for part in config.split(",")).get(device.type, dist.get_backend(group))


def wire_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where what travels lies: gloo reads and writes host memory only."""
    return CPU if backend_of(group, device) == "gloo" else device
