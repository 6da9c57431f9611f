"""Reconnects: whatever connections are cut, and when, results are those of an undisturbed run."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.comm.secure.groups import joined
from tests.comm.secure.network import throwaway_tls
from tests.comm.secure.test_process_group import gradients_over
from tests.pool import Pool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    throwaway_tls(tmp_path)
    return tmp_path


def train_while_cut(gloo: Any, folder: Path, seed: int, cuts: int) -> list[list[Tensor]]:
    """A pipeline, collectives and replicas, while a thread cuts connections at seeded moments."""
    with joined(gloo, folder) as here:
        done, rng = threading.Event(), random.Random(seed + gloo.rank())

        def cut_connections() -> None:
            while not done.is_set():
                time.sleep(rng.choice((0, 0.001, 0.005, 0.02)))
                if 0 < len(here.listener.raw) <= cuts:
                    here.listener.cut()

        cutting = threading.Thread(target=cut_connections)
        cutting.start()
        found = []
        try:
            while True:
                found = [gradients_over(here.group, "client-server", "none", 4)]
                found.append([torch.stack(each) for each in collectives_of(here.group)])
                count = torch.tensor([len(here.listener.raw)])
                dist.all_reduce(count, group=here.group, op=dist.ReduceOp.MAX)
                if int(count) > cuts:
                    return found
        finally:
            done.set()
            cutting.join()


def collectives_of(group: Any) -> list[list[Tensor]]:
    found = []
    for size in (1, 1000, 700_000):
        mine = torch.randn(size, generator=torch.Generator().manual_seed(group.rank()))
        parts = [torch.empty(size) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
        dist.all_reduce(mine, group=group)
        found.append([*parts, mine])
    return found


def undisturbed(gloo: Any) -> list[list[Tensor]]:
    return [
        gradients_over(gloo, "client-server", "none", 4),
        [torch.stack(each) for each in collectives_of(gloo)],
    ]


@pytest.mark.parametrize("workers", [2, 3])
def test_200_cuts(pool: Pool, folder: Path, workers: int) -> None:
    """All results are those of gloo without cuts: sums of two are the same in any order."""
    expected = pool.run(undisturbed, workers)
    for ours, theirs in zip(pool.run(train_while_cut, workers, folder, 0, 200), expected, strict=True):
        for mine, right in zip(ours, theirs, strict=True):
            for one, other in zip(mine, right, strict=True):
                if workers == 2:
                    assert torch.equal(one, other)
                else:
                    torch.testing.assert_close(one, other)
