"""A worker's view of all workers: its rank, its device, and the process groups for tensors and small messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from thinpipe.comm.backend import CPU, host_group
from thinpipe.comm.group import Group, ProcessGroup
from thinpipe.comm.membership import member
from thinpipe.system.sanitize import printable

Result = TypeVar("Result")


class SetupError(ValueError):
    """The user's input cannot be run; the same error is raised on all workers, before the first step."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One worker of a run, with the collectives that connect it to the others."""

    worker: int
    workers: int
    device: torch.device
    group: ProcessGroup | None = None  # carries tensors on the device; None: the default group
    control: Group  # carries statistics, JSON and streams of bytes, in host memory
    machine: int = 0  # number of this machine, if machines are numbered

    @property
    def is_client(self) -> bool:
        return self.worker == 0

    def to_device(self, module: nn.Module) -> nn.Module:
        """Move a module to the device. On a CPU, convert it to channels-last, which makes convolutions faster."""
        if self.device.type == "cpu":
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module.to(self.device)

    def gather(self, facts: Any) -> list[Any]:
        """Return the facts (JSON) of every worker, on all workers. A collective."""
        return self.control.gather(facts)

    def together(self, function: Callable[[], Result]) -> Result:
        """Call a function on all workers; a ValueError on one raises SetupError on all, so that none keeps waiting."""
        result, problem = None, None
        try:
            result = function()
        except SetupError:  # raised on all workers already
            raise
        except ValueError as error:
            problem = str(error)
        problems = [each for each in self.gather(problem) if each is not None]
        if problems:
            raise SetupError(printable(problems[0]))  # perhaps of another worker
        return result  # type: ignore[return-value]


def join_world(devices: str | Sequence[str], *, threads: int | None = None) -> World:
    """Return the world of this process, in the process group that it has joined.

    NCCL carries tensors only if every worker has a GPU of its own.

    ``devices`` is ``"cpu"`` or ``"cuda"`` for all, or one of these for each worker; workers share GPUs if there are
    too few. ``threads``: None leaves this worker its share of the cores.
    """
    me = member()
    assert me is not None
    if threads is not None:
        torch.set_num_threads(threads)
    host = host_group()
    control = Group.of(host)
    kinds = {devices} if isinstance(devices, str) else set(devices)
    device = devices if isinstance(devices, str) else devices[control.rank]
    where = CPU
    if device == "cuda":
        where = torch.device("cuda", me.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    return World(
        worker=control.rank,
        workers=control.size,
        device=where,
        group=None if kinds == {"cuda"} else host,
        control=control,
        machine=me.machine,
    )
