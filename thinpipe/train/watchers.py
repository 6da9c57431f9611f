"""Watchers of single steps: a timeline of one step (``--trace``), and the tensors sent in some (``--capture``).

Captured tensors are those before encoding, in one safetensors file:

    forward/0-1/0/step000003/chunk0     direction/stages/which tensor/step/chunk

Workers keep the float tensors that they send. After each such step the client gathers them and rewrites the complete
file. So there is one file even on several machines, and an interrupted run leaves all that it captured. If the disk is
full, the next captured step retries with all tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from thinpipe.comm.membership import print_line
from thinpipe.comm.streams import fill_tensors, tensor_pieces
from thinpipe.links.link import Link
from thinpipe.options import OptionError, named
from thinpipe.pipeline.trace import draw, gather_step, write_chrome_trace
from thinpipe.system.files import replace_file
from thinpipe.system.sanitize import first_line
from thinpipe.system.sizes import size_text
from thinpipe.system.tensors import empty_tensor, spec_bytes, specs_of
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.pipeline import PipelineEngine
from thinpipe.train.engines.world import World
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.settings import Settings
from thinpipe.version import __version__

_TRACED = 10  # index among this process's steps, after warm-up; or the last step if there are fewer
_SPREAD = (0.1, 0.5, 1.0)  # of a run: early, but not its very first steps; in the middle; at the end


class StepWatcher(Protocol):
    """An observer of selected steps of a pipeline; the same ones on every worker."""

    file_bytes: int  # maximum size of the file it writes

    def begin(self, step: int) -> bool:
        """Return True if it observes this step, which is about to start."""
        ...

    def end(self) -> None:
        """Process the observed step, which is done. A collective."""
        ...


def make_watchers(
    running: RunOptions, settings: Settings, engine: Engine, *, first_step: int, last_step: int
) -> tuple[StepWatcher, ...]:
    """Return the watchers that the options request; raise ValueError if the run cannot have them."""
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
    """A watcher that traces one step and writes the timeline to ``path``."""

    file_bytes = 0  # negligible

    def __init__(self, path: Path, engine: PipelineEngine, first_step: int, last_step: int) -> None:
        self._path, self._engine = path, engine
        self._step = min(first_step + _TRACED, last_step)

    def begin(self, step: int) -> bool:
        if step != self._step:
            return False
        for link in self._engine.links:
            link.trace = True
        return True

    def end(self) -> None:
        bars = gather_step(self._engine.training_stages)
        for link in self._engine.links:
            link.trace = False
        if self._engine.world.is_client:
            with replace_or_warn("{trace}", self._path) as temporary:
                (draw if self._path.suffix == ".png" else write_chrome_trace)(bars, temporary)


class StepCapture:
    """A watcher that captures the requested steps after ``first_step``, already done, up to ``last_step``.

    Raises ValueError if that is impossible: on all workers, or on the client only for problems of its file.
    """

    def __init__(
        self, capture: Capture, settings: Settings, engine: PipelineEngine, *, first_step: int, last_step: int
    ) -> None:
        self._path, self._chunks, self._engine = capture.path, capture.chunks, engine
        self._origin = {"thinpipe": __version__, "settings": json.dumps(settings.to_json())}
        self._mine: dict[str, Tensor] = {}  # of the current step
        self._step = 0
        if capture.chunks > settings.chunks:
            raise OptionError(f"a step has {settings.chunks} chunks, {{capture_chunks}} asks for {capture.chunks}")
        steps = capture.steps or tuple(sorted({max(1, round(part * last_step)) for part in _SPREAD}))
        if max(steps) > last_step:
            raise OptionError(f"this run ends with step {last_step}, {{capture_steps}} asks for {max(steps)}")
        self.steps = {step for step in steps if step > first_step}
        # Captured by the same run before it was interrupted.
        self._kept = self._read(first_step) if first_step and engine.world.is_client else {}
        lost = sorted({step for step in steps if step <= first_step} - set(map(_step_of, self._kept)))
        if capture.steps is not None and lost and engine.world.is_client:
            raise OptionError(
                f"this run goes on after step {first_step}, {{capture_steps}} asks for step {lost[0]}, and "
                f"{capture.path} does not have it; ask for later ones"
            )
        self.file_bytes = len(steps) * capture.chunks * engine.partition.float_bytes_per_chunk()
        if self.file_bytes > capture.limit:
            raise OptionError(
                f"{{capture}} would write {size_text(self.file_bytes)}: {len(steps)} steps, {capture.chunks} chunks of "
                f"each, {size_text(engine.partition.float_bytes_per_chunk())} a chunk; {{capture_limit}} allows "
                f"{size_text(capture.limit)}. Ask for fewer steps or chunks, or allow more"
            )

    def begin(self, step: int) -> bool:
        if step not in self.steps:
            return False
        self._step = step
        for link in self._engine.links:
            link.tap = self._keep
        return True

    def end(self) -> None:
        from safetensors.torch import save_file

        for link in self._engine.links:
            link.tap = None
        self._kept |= _gather_at_client(self._mine, self._engine.world, most=self.file_bytes)
        self._mine = {}
        if self._engine.world.is_client:
            with replace_or_warn("{capture}", self._path) as temporary:
                save_file(self._kept, temporary, metadata=self._origin)

    def _keep(self, link: Link, chunk: int, slot: int, tensor: Tensor) -> None:
        if chunk < self._chunks and tensor.is_floating_point():
            name = f"{link.direction}/{link.source}-{link.target}/{slot}/step{self._step:06d}/chunk{chunk}"
            if name not in self._mine:  # only the first batch of a step
                self._mine[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def _read(self, first_step: int) -> dict[str, Tensor]:
        """Return the tensors of this run in the file, up to a step; empty if the file is of another run or missing."""
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
    """Return every worker's tensors on the client, an empty dict elsewhere. A collective.

    ``most`` is the total size of a run's captures: a tensor announced as larger is rejected.
    """
    everyone = world.gather(specs_of(mine))
    if not world.is_client:
        world.control.send_pieces(tensor_pieces(mine.values()), 0)
        return {}
    gathered = dict(mine)
    for worker, specs in enumerate(everyone[1:], start=1):
        size = sum(map(spec_bytes, specs.values()))
        if size > most:
            raise ValueError(f"worker {worker} announced captured tensors of {size} bytes, {most} are the most")
        pieces = world.control.receive_pieces(size, worker)
        gathered |= zip(specs, fill_tensors(map(empty_tensor, specs.values()), pieces), strict=True)
    return gathered


@contextmanager
def replace_or_warn(option: str, path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; the file is put at ``path`` complete, or not at all.

    If writing to the disk fails, print a warning that names ``option``, as in {trace}, and continue the run.
    """
    from safetensors import SafetensorError  # raised for a full disk

    try:
        with replace_file(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        print_line(f"{named(option)} {path} is not written, the run goes on: {first_line(error)}")
