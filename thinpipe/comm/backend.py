"""Capabilities of the backends of ``torch.distributed``, declared once; callers test capabilities, not names.

A third-party backend is registered after ``dist.Backend.register_backend``::

    register_backend("tls", Capabilities(tags=True, host_memory=True, short_receive=True, preconnected=True,
                                         encrypted=True))

An unregistered backend is an error: a fallback to another one could send data unencrypted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of a backend."""

    tags: bool  # messages are matched by tag: receives can be posted ahead, and complete in any order
    host_memory: bool  # sends from and receives into host memory only
    short_receive: bool  # a message may be shorter than the receive that was posted for it
    preconnected: bool  # every pair of workers is connected once ``init_process_group`` returns
    encrypted: bool = False


_BACKENDS = {
    "gloo": Capabilities(tags=True, host_memory=True, short_receive=True, preconnected=True),
    "nccl": Capabilities(tags=False, host_memory=False, short_receive=False, preconnected=False),
}


def register_backend(name: str, capabilities: Capabilities) -> None:
    """Register a third-party backend; raise ValueError if it is registered with other capabilities."""
    if _BACKENDS.setdefault(name, capabilities) != capabilities:
        raise ValueError(f"backend {name!r} is registered with other capabilities: {_BACKENDS[name]}")


def capabilities(name: str) -> Capabilities:
    """Return the capabilities of a backend; raise ValueError if it is not registered."""
    if name not in _BACKENDS:
        raise ValueError(
            f"thinpipe does not know what backend {name!r} can do, and never replaces it by another; take one of "
            f"{', '.join(_BACKENDS)}, or announce it with thinpipe.comm.backend.register_backend"
        )
    return _BACKENDS[name]


def capabilities_of(group: dist.ProcessGroup | None, device: torch.device) -> Capabilities:
    """Return the capabilities of a group's backend for a device; a group may have one backend per device type."""
    return capabilities(_backends(group).get(device.type, dist.get_backend(group)))


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend of a group for each device type."""
    config = str(dist.get_backend_config(group))
    return dict(part.split(":") for part in config.split(",") if ":" in part)


def is_preconnected() -> bool:
    """Return True if the default group opens no connections later, whatever the device."""
    return all(name in _BACKENDS and _BACKENDS[name].preconnected for name in _backends(None).values())


def wire_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Return the device of the buffers that a group sends from or receives into, for tensors on ``device``."""
    return CPU if capabilities_of(group, device).host_memory else device


def default_backend(device: torch.device) -> str:
    """Return the backend of new groups for a device: the default group's, or gloo if that has no host memory."""
    name = _backends(None).get(device.type, dist.get_backend())
    return name if device.type != "cpu" or capabilities(name).host_memory else "gloo"


def new_group(
    ranks: Sequence[int] | None = None, *, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Create a process group of these ranks, by default of all, for tensors in host memory. A collective of all.

    ``backend``: of tensors elsewhere. Raise ValueError if the default group encrypts what this one would not.
    """
    name, present = backend or default_backend(CPU), _backends(None).values()
    encrypted = sorted(each for each in present if capabilities(each).encrypted)
    if encrypted and name not in present and not capabilities(name).encrypted:
        raise ValueError(
            f"backend {encrypted[0]!r} encrypts, and a group of {name!r} would send in the clear. Initialize the "
            "process group with an encrypted backend for the CPU too, as in 'cpu:NAME,cuda:NAME', or name that backend"
        )
    return dist.new_group(None if ranks is None else list(ranks), backend=name, timeout=timeout)


def host_group() -> dist.ProcessGroup | None:
    """Return a group for tensors in host memory: the default one (None) if it can, else a new one. A collective."""
    return None if capabilities_of(None, CPU).host_memory else new_group()
