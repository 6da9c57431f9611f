"""A backend from outside, as a test's stand-in for an encrypted one: it counts messages and passes them on to gloo."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from tests.train.toy import Ears, ToyTask, settings_for
from thinpipe.comm.backend import Capabilities, register_backend
from thinpipe.train.engines.world import join_world
from thinpipe.train.running import RunOptions
from thinpipe.train.worker import train

COUNTS: Counter[str] = Counter()  # operation -> calls


class CountingGroup(dist.ProcessGroup):
    """Counts the operations that thinpipe uses; all others fail."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "counting"

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        COUNTS["send"] += 1
        return self._gloo.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        COUNTS["recv"] += 1
        return self._gloo.recv(tensors, src, tag)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        COUNTS["allgather"] += 1
        return self._gloo.allgather(outputs, inputs)


dist.Backend.register_backend("counting", CountingGroup, devices=["cpu"])
dist.Backend.register_backend("unannounced", CountingGroup, devices=["cpu"])
register_backend(
    "counting", Capabilities(tags=True, host_memory=True, short_receive=True, preconnected=True, encrypted=True)
)


def train_counted() -> tuple[str, dict[str, int], int]:
    """Train the toy; return the hash of its parameters, the operations counted, and how many groups there are."""
    ears = Ears()
    train(ToyTask(), settings_for(ToyTask(), None, workers=2), RunOptions(), join_world("cpu"), lambda: ears)
    return ears.end.parameters_sha256 if ears.end else "", dict(COUNTS), len(_world.pg_map)


def join_unannounced() -> str:
    try:
        join_world("cpu")
    except ValueError as error:
        return str(error)
    return "joined"
