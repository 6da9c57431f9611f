"""Where a worker stands among the others: its number, its device, and the groups that carry tensors and words."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinpipe.workers.backend import CPU
from thinpipe.workers.exchange import add_up, gather


@dataclass(frozen=True, kw_only=True)
class Place:
    """One worker of a run."""

    worker: int
    workers: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # carries tensors on the device; None: the default group
    words: dist.ProcessGroup | None = None  # gloo, carries numbers and JSON on the CPU; None: the default group

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
            add_up(numbers, self.words)
        return numbers

    def gather(self, facts: Any) -> list[Any]:
        """What every worker has to say (JSON), on all of them. A collective."""
        return gather(facts, self.words, CPU) if self.workers > 1 else [facts]

    def barrier(self) -> None:
        if self.workers > 1:
            self.sum(torch.zeros(1))


def place(device: str) -> Place:
    """This process's place in the group it has joined. NCCL carries tensors only between workers with own GPUs."""
    words = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    if device == "cpu":
        where, group = CPU, words
    else:
        where, group = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()), None
        torch.cuda.set_device(where)
    return Place(worker=dist.get_rank(), workers=dist.get_world_size(), device=where, group=group, words=words)
