"""Two workers, of which one comes to grief in the middle of a step; run by test_launch.py as a user runs a script."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

import thinpipe
from tests.pipeline.models import batch, seeded
from thinpipe.launch.workers import run_workers

CHUNKS = 4


class Trap(nn.Module):
    """Springs on the third call: the second chunk, if the first call is torch learning the shapes."""

    def __init__(self, scenario: str) -> None:
        super().__init__()
        self.scenario, self.calls = scenario, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and self.scenario == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 3 and self.scenario == "raise":
            raise RuntimeError("this stage is broken")
        return x


class Flipping:
    """``isend`` with one bit changed in the second message of the third step; probes of the delay do not count."""

    def __init__(self) -> None:
        self.send, self.calls = dist.isend, 0

    def __call__(self, message: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls += len(message) > 64
        if self.calls == 2 * CHUNKS + 2:
            message[5] ^= 16
        return self.send(message, *args, **kwargs)


def train(scenario: str) -> None:
    worker = dist.get_rank()
    codec = "uniform:4" if worker == 1 and scenario == "disagree" else "uniform:8"
    module = nn.Sequential(seeded(2)[worker], Trap(scenario if worker == 1 else "none"))
    schedule = ScheduleGPipe(
        thinpipe.PipelineStage(module, worker, 2, "cpu", forward=codec), CHUNKS, loss_fn=nn.functional.mse_loss
    )
    if scenario == "flip" and worker == 0:
        dist.isend = Flipping()
    x, y = batch(16)
    for _ in range(3):
        schedule.step(*([x] if worker == 0 else []), target=y if worker == 1 else None)


if __name__ == "__main__":
    run_workers(train, sys.argv[1], workers=2)
