"""What crosses the links in a few steps of a run, as it is before a codec sees it, in one safetensors file.

    forward/0-1/0/step000003/chunk0     direction/stages/which tensor/step/chunk

Workers keep the float tensors that they send. After each such step the client gathers them and writes the file anew,
whole: on several machines there is still one file, and a run that breaks off has left what it captured. Where the disk
is full, the next such step tries again with all of them.
"""

from __future__ import annotations

import json
import math
import re

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.codecs.base import as_bytes
from thinpipe.measure.sizes import size_text
from thinpipe.options import OptionError
from thinpipe.pipeline.links.link import Link
from thinpipe.training.beside import written_beside
from thinpipe.training.engine import Engine
from thinpipe.training.pipeline_engine import PipelineEngine
from thinpipe.training.place import Place
from thinpipe.training.settings import Capture, Settings
from thinpipe.version import __version__
from thinpipe.workers.exchange import needing_peers

_SPREAD = (0.1, 0.5, 1.0)  # of a run: early, but not its very first steps; in the middle; at the end


class StepCapture:
    """Captures the steps that are asked for between ``first_step``, already done, and ``last_step``.

    ValueError where that cannot be; the same on all workers, but for what only the client sees of its file.
    """

    def __init__(
        self, asked: Capture, settings: Settings, engine: PipelineEngine, *, first_step: int, last_step: int
    ) -> None:
        self._path, self._chunks = asked.path, asked.chunks
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
        self._kept = self._read(first_step) if first_step and engine.place.is_client else {}
        lost = sorted({step for step in steps if step <= first_step} - set(map(_step_of, self._kept)))
        if asked.steps is not None and lost and engine.place.is_client:
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

    def begin(self, engine: Engine, step: int) -> bool:
        """Whether this step, just about to start, is captured."""
        if step not in self.steps:
            return False
        assert isinstance(engine, PipelineEngine)
        self._step = step
        engine.tap(self._keep)
        return True

    def end(self, engine: Engine) -> None:
        """A collective."""
        from safetensors.torch import save_file

        assert isinstance(engine, PipelineEngine)
        engine.tap(None)
        self._kept |= _gather_at_client(self._mine, engine.place, most=self.file_bytes)
        self._mine = {}
        if engine.place.is_client:
            with written_beside("{capture}", self._path) as temporary:
                save_file(self._kept, temporary, metadata=self._origin)

    def _keep(self, link: Link, chunk: int, slot: int, tensor: Tensor) -> None:
        if chunk < self._chunks and tensor.is_floating_point():
            name = f"{link.direction}/{link.source}-{link.target}/{slot}/step{self._step:06d}/chunk{chunk}"
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


def _gather_at_client(mine: dict[str, Tensor], place: Place, most: int) -> dict[str, Tensor]:
    """Every worker's tensors, on the client; nothing elsewhere. A collective.

    ``most`` is what all of a run's captures have together: a worker that announces more is not believed.
    """
    described = {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in mine.items()}
    everyone = place.gather(described)
    if not place.is_client:
        with needing_peers("sending captured tensors"):
            for tensor in mine.values():
                dist.send(as_bytes(tensor), group=place.words, group_dst=0)
        return {}
    gathered = dict(mine)
    for worker, theirs in enumerate(everyone[1:], start=1):
        for name, (shape, dtype) in theirs.items():
            size = math.prod(shape) * getattr(torch, dtype).itemsize
            if size > most:
                raise ValueError(f"worker {worker} announced a captured tensor of {size} bytes, {most} are the most")
            gathered[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            with needing_peers("receiving captured tensors"):
                dist.recv(as_bytes(gathered[name]), group=place.words, group_src=worker)
    return gathered
