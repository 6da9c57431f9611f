"""Watchers of single steps: one as a picture (``--trace``), and what crosses the links in a few (``--capture``).

Captured tensors are as they were before a codec saw them, in one safetensors file:

    forward/0-1/0/step000003/chunk0     direction/stages/which tensor/step/chunk

Workers keep the float tensors that they send. After each such step the client gathers them and writes the file anew,
whole: on several machines there is still one file, and a run that breaks off has left what it captured. Where the disk
is full, the next such step tries again with all of them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.codecs.base import as_bytes
from thinpipe.comm.exchange import needing_peers
from thinpipe.links.link import Link
from thinpipe.options import OptionError, named
from thinpipe.pipeline.trace import draw, gather_step, write_chrome_trace
from thinpipe.system.files import written_whole
from thinpipe.system.sizes import size_text
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.pipeline import PipelineEngine
from thinpipe.train.engines.world import World
from thinpipe.train.running import Capture, Running
from thinpipe.train.settings import Settings
from thinpipe.version import __version__

_TRACED = 10  # of the steps this process makes, or the last if there are fewer: by then everything has warmed up
_SPREAD = (0.1, 0.5, 1.0)  # of a run: early, but not its very first steps; in the middle; at the end


class StepWatcher(Protocol):
    """Looks closely at some of the steps of a pipeline; the same ones on every worker."""

    file_bytes: int  # that it writes at the most

    def begin(self, step: int) -> bool:
        """Whether it looks at this step, which is about to start."""
        ...

    def end(self) -> None:
        """That step is done. A collective."""
        ...


def make_watchers(
    running: Running, settings: Settings, engine: Engine, *, first_step: int, last_step: int
) -> tuple[StepWatcher, ...]:
    """Those that are asked for; ValueError where they cannot be."""
    running.check_watchable(settings)
    if not isinstance(engine, PipelineEngine):
        return ()
    watchers: list[StepWatcher] = []
    if running.trace is not None:
        watchers.append(StepTrace(running.trace, engine, first_step, last_step))
    if running.capture is not None:
        watchers.append(StepCapture(running.capture, settings, engine, first_step=first_step, last_step=last_step))
    return tuple(watchers)


class StepTrace:
    """Traces one step and writes it to ``path``."""

    file_bytes = 0  # next to nothing

    def __init__(self, path: Path, engine: PipelineEngine, first_step: int, last_step: int) -> None:
        self._path, self._engine = path, engine
        self._step = min(first_step + _TRACED, last_step)

    def begin(self, step: int) -> bool:
        if step != self._step:
            return False
        self._engine.trace(True)
        return True

    def end(self) -> None:
        bars = gather_step(self._engine.training_stages)
        self._engine.trace(False)
        if self._engine.world.is_client:
            with written_beside("{trace}", self._path) as temporary:
                (draw if self._path.suffix == ".png" else write_chrome_trace)(bars, temporary)


class StepCapture:
    """Captures the steps that are asked for between ``first_step``, already done, and ``last_step``.

    ValueError where that cannot be; the same on all workers, but for what only the client sees of its file.
    """

    def __init__(
        self, asked: Capture, settings: Settings, engine: PipelineEngine, *, first_step: int, last_step: int
    ) -> None:
        self._path, self._chunks, self._engine = asked.path, asked.chunks, engine
        self._origin = {"thinpipe": __version__, "settings": json.dumps(settings.to_json())}
        self._mine: dict[str, Tensor] = {}  # of the step under way
        self._step = 0
        if asked.chunks > settings.chunks:
            raise OptionError(f"a step has {settings.chunks} chunks, {{capture_chunks}} asks for {asked.chunks}")
        steps = asked.steps or tuple(sorted({max(1, round(part * last_step)) for part in _SPREAD}))
        if max(steps) > last_step:
            raise OptionError(f"this run ends with step {last_step}, {{capture_steps}} asks for {max(steps)}")
        self.steps = {step for step in steps if step > first_step}
        # What the same run captured before it was broken off.
        self._kept = self._read(first_step) if first_step and engine.world.is_client else {}
        lost = sorted({step for step in steps if step <= first_step} - set(map(_step_of, self._kept)))
        if asked.steps is not None and lost and engine.world.is_client:
            raise OptionError(
                f"this run goes on after step {first_step}, {{capture_steps}} asks for step {lost[0]}, and "
                f"{asked.path} does not have it; ask for later ones"
            )
        self.file_bytes = len(steps) * asked.chunks * engine.float_bytes_per_chunk()
        if self.file_bytes > asked.limit:
            raise OptionError(
                f"{{capture}} would write {size_text(self.file_bytes)}: {len(steps)} steps, {asked.chunks} chunks of "
                f"each, {size_text(engine.float_bytes_per_chunk())} a chunk; {{capture_limit}} allows "
                f"{size_text(asked.limit)}. Ask for fewer steps or chunks, or allow more"
            )

    def begin(self, step: int) -> bool:
        if step not in self.steps:
            return False
        self._step = step
        self._engine.tap(self._keep)
        return True

    def end(self) -> None:
        from safetensors.torch import save_file

        self._engine.tap(None)
        self._kept |= _gather_at_client(self._mine, self._engine.world, most=self.file_bytes)
        self._mine = {}
        if self._engine.world.is_client:
            with written_beside("{capture}", self._path) as temporary:
                save_file(self._kept, temporary, metadata=self._origin)

    def _keep(self, link: Link, chunk: int, slot: int, tensor: Tensor) -> None:
        if chunk < self._chunks and tensor.is_floating_point():
            name = f"{link.direction}/{link.source}-{link.target}/{slot}/step{self._step:06d}/chunk{chunk}"
            if name not in self._mine:  # of several batches of a step, the first one's
                self._mine[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def _read(self, first_step: int) -> dict[str, Tensor]:
        """What the file has of this very run, up to a step; nothing if it is another's, or not there."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path, framework="pt") as file:
                if (file.metadata() or {}) != self._origin:
                    return {}
                names = [name for name in file.keys() if _step_of(name) <= first_step]  # noqa: SIM118, it is no dict
                return {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError):
            return {}


def _step_of(name: str) -> int:
    found = re.search(r"/step(\d+)/", name)
    assert found is not None
    return int(found[1])


def _gather_at_client(mine: dict[str, Tensor], world: World, most: int) -> dict[str, Tensor]:
    """Every worker's tensors, on the client; nothing elsewhere. A collective.

    ``most`` is what all of a run's captures have together: a worker that announces more is not believed.
    """
    described = {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in mine.items()}
    everyone = world.gather(described)
    if not world.is_client:
        with needing_peers("sending captured tensors"):
            for tensor in mine.values():
                dist.send(as_bytes(tensor), group=world.control_group, group_dst=0)
        return {}
    gathered = dict(mine)
    for worker, theirs in enumerate(everyone[1:], start=1):
        for name, (shape, dtype) in theirs.items():
            size = math.prod(shape) * getattr(torch, dtype).itemsize
            if size > most:
                raise ValueError(f"worker {worker} announced a captured tensor of {size} bytes, {most} are the most")
            gathered[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            with needing_peers("receiving captured tensors"):
                dist.recv(as_bytes(gathered[name]), group=world.control_group, group_src=worker)
    return gathered


@contextmanager
def written_beside(option: str, path: Path) -> Iterator[Path]:
    """Where to write what is to be at ``path``, whole or not at all; ``option`` asked for it, as in {trace}.

    A disk that does not take it is told in a line, and does not end the run.
    """
    from safetensors import SafetensorError  # its word for a full disk

    try:
        with written_whole(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        line = str(error).partition("\n")[0]
        print(f"thinpipe: {named(option)} {path} is not written, the run goes on: {line}", file=sys.stderr, flush=True)
