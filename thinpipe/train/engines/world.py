"""A worker's view of all workers: its number, its device, and the groups that carry tensors and small messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from thinpipe.comm.backend import CPU, host_group
from thinpipe.comm.exchange import Sum, add_up, gather
from thinpipe.comm.membership import member
from thinpipe.system.sanitize import printable

Result = TypeVar("Result")


class SetupError(ValueError):
    """What the user gave cannot be run; raised alike on all workers, before the first step."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One worker of a run, among the others."""

    worker: int
    workers: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # carries tensors on the device; None: the default group
    control_group: dist.ProcessGroup | None = None  # carries statistics and JSON on the CPU; None: the default group
    machine: int = 0  # the number of the machine, where somebody counts them

    @property
    def is_client(self) -> bool:
        return self.worker == 0

    def hold(self, module: nn.Module) -> nn.Module:
        """Move a module here. On a CPU convolutions are faster with the channels of a pixel side by side."""
        if self.device.type == "cpu":
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module.to(self.device)

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Add up a tensor on the CPU over all workers, in place. A collective."""
        if self.workers > 1:
            add_up(numbers, self.control_group)
        return numbers

    def expect_sum(self, count: int) -> Sum:
        """The same of numbers that are not known yet, without a wait for those who are not ready to hear them."""
        return Sum(count, worker=self.worker, workers=self.workers, group=self.control_group)

    def gather(self, facts: Any) -> list[Any]:
        """What every worker has to say (JSON), on all of them. A collective."""
        return gather(facts, self.control_group, CPU) if self.workers > 1 else [facts]

    def barrier(self) -> None:
        self.sum(torch.zeros(1))

    def together(self, function: Callable[[], Result]) -> Result:
        """Call a function on all workers; a ValueError on one is an error on all, and none waits for another."""
        result, problem = None, None
        try:
            result = function()
        except SetupError:  # which all know of
            raise
        except ValueError as error:
            problem = str(error)
        problems = [each for each in self.gather(problem) if each is not None]
        if problems:
            raise SetupError(printable(problems[0]))  # of another worker
        return result  # type: ignore[return-value]


def join_world(devices: str | Sequence[str], *, threads: int | None = None) -> World:
    """The world of this process, in the group that it has joined. NCCL carries tensors only between own GPUs.

    ``devices`` is ``"cpu"`` or ``"cuda"`` for all, or one of these for each worker; workers share GPUs where there are
    too few. ``threads``: None leaves this worker its share of the cores.
    """
    me = member()
    assert me is not None
    if threads is not None:
        torch.set_num_threads(threads)
    control_group = host_group()
    kinds = {devices} if isinstance(devices, str) else set(devices)
    device = devices if isinstance(devices, str) else devices[dist.get_rank()]
    where = CPU
    if device == "cuda":
        where = torch.device("cuda", me.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    return World(
        worker=dist.get_rank(),
        workers=dist.get_world_size(),
        device=where,
        group=None if kinds == {"cuda"} else control_group,
        control_group=control_group,
        machine=me.machine,
    )
