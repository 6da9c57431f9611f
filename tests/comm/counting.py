"""A backend from outside, as a test's stand-in for an encrypted one: it counts messages and passes them on to gloo.

This module is imported before a worker joins the others, so its audit hook records all of Python's sockets; those of
C++ (gloo, torch's store) are seen as descriptors of the process.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from tests.train.toy import Recorder, ToyTask, settings_for
from thinpipe.comm.backend import Capabilities, new_group, register_backend
from thinpipe.train.engines.world import World, join_world
from thinpipe.train.evaluation import evaluate_on_worker
from thinpipe.train.generation.prompts import Prompt
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.generation.worker import generate
from thinpipe.train.running import RunOptions
from thinpipe.train.worker import train

COUNTS: Counter[str] = Counter()  # operation -> calls
OPENED: list[str] = []  # connections and listening sockets that Python opened
_GLOO = dist.ProcessGroupGloo  # only this module may create it


class NoGloo:
    """In the place of gloo where torch creates groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("gloo was created")


GLOO_FORBIDDEN = mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", NoGloo)


class CountingGroup(dist.ProcessGroup):
    """Counts the operations that thinpipe uses; all others fail."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = _GLOO(store, rank, size, timeout)

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


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.bind", "socket.sendto"):
        OPENED.append(event)


sys.addaudithook(_audit)
dist.Backend.register_backend("counting", CountingGroup, devices=["cpu"])
dist.Backend.register_backend("unannounced", CountingGroup, devices=["cpu"])
register_backend(
    "counting", Capabilities(tags=True, host_memory=True, short_receive=True, preconnected=True, encrypted=True)
)


@dataclass(frozen=True)
class Counted:
    """The observations of one worker in a training run, an evaluation and a generation."""

    rank: int
    result: Any  # of the client: the hash of the parameters, the loss, the tokens
    counts: dict[str, dict[str, int]]  # by phase: operation -> calls
    groups: int
    opened: list[str]  # by Python, before and after joining
    new_sockets: int  # of any library, after joining


def run_counted(folder: Path) -> Counted:
    """Train the toy with checkpoints of the client, evaluate the run, and generate with the model in ``folder``."""
    with GLOO_FORBIDDEN:
        before = _sockets()
        world = join_world("cpu")
        result, counts = {}, {}
        for phase in (_train, _evaluate, _generate):
            COUNTS.clear()
            result[phase.__name__] = phase(world, folder)
            counts[phase.__name__] = dict(COUNTS)
        return Counted(world.worker, result, counts, len(_world.pg_map), list(OPENED), len(_sockets() - before))


def _train(world: World, folder: Path) -> str:
    recorder = Recorder()
    running = RunOptions(save=folder / "run" / str(world.worker), save_local=True)
    train(ToyTask(), settings_for(ToyTask(), None, workers=2), running, world, lambda: recorder)
    return recorder.end.parameters_sha256 if recorder.end else ""


def _evaluate(world: World, folder: Path) -> float:
    settings = settings_for(ToyTask(), None, workers=2)
    return evaluate_on_worker(world, settings, folder / "run" / "0", None, "validation", ToyTask()).found.loss


def _generate(world: World, folder: Path) -> list[list[int]]:
    settings = GenerationSettings(model=str(folder), workers=2, max_new_tokens=4, device="cpu")
    prompts = [Prompt("", [1, 2, 3])] if world.is_client else None
    runs = generate(settings, world, prompts, lambda number, text, tokens: None, lambda tokenizer: None)
    return [tokens for run in runs for tokens in run.tokens]


def _sockets() -> set[str]:
    """Return the sockets that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in found if target.startswith("socket:")}


def create_groups() -> tuple[list[str], str, str]:
    """Return the backends of new groups, and the errors of one that would not encrypt and of one created by torch."""
    names = [dist.get_backend(new_group(ranks)) for ranks in (None, range(2))]
    with GLOO_FORBIDDEN:
        return names, _error_of(lambda: new_group(backend="gloo")), _error_of(lambda: dist.new_group(backend="gloo"))


def join_unannounced() -> str:
    return _error_of(lambda: join_world("cpu"))


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, AssertionError) as error:
        return str(error)
    return "no error"
