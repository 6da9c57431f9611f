"""Taking a trained model home: the folder that transformers loads, with a card, from a run's end or a checkpoint.

At the end of a run:

1  before the first step the client has found all that could be wrong but the disk: config, tokenizer, who has what
2  every worker sends its tensors to the client, which writes them as they come
3  all tell the hash of what they sent, or what went wrong; only then the folder gets its name
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from thinpipe.engines.engine import Engine
from thinpipe.engines.units import Fill
from thinpipe.measure.sizes import size_text
from thinpipe.models.save import ModelFolder, ModelForm
from thinpipe.options import OptionError
from thinpipe.training.checkpoints.manifest import Manifest, Progress
from thinpipe.training.checkpoints.part import (
    DamagedError,
    HashedPieces,
    filled,
    receive_pieces,
    send_pieces,
    tensor_pieces,
)
from thinpipe.training.checkpoints.state import model_tensors
from thinpipe.training.settings import Settings
from thinpipe.version import __version__
from thinpipe.workers.activity import ACTIVITY
from thinpipe.workloads.task import Shape, Task

_MODEL = "model/"  # what names of the model's tensors begin with in a checkpoint
# Class of transformers that loads a model, and what the hub calls what it does, by the end of the model's class.
_KINDS = {
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
}


@dataclass(frozen=True, kw_only=True)
class Export:
    """All that is known of an exported folder before there are trained weights."""

    directory: Path
    form: ModelForm
    settings: Settings
    files: Mapping[str, bytes]  # that belong to the model: a tokenizer's
    fill: Fill | None  # gives parameters of the model their values; None: it was built with them

    @staticmethod
    def of(directory: Path, model: nn.Module, task: Task, settings: Settings, kept: Mapping[str, bytes]) -> Export:
        """Of a model as it was built for a run. ValueError for what cannot be exported.

        ``kept`` are the companions that the run has of its own: a tokenizer that it has trained.
        """
        return Export(
            directory=directory,
            form=ModelForm(model),
            settings=settings,
            files={**task.companions(settings.source), **kept},
            fill=task.fill(settings.source, settings.seed),
        )

    def card(self, progress: Progress) -> str:
        """The README of the folder, as the hub shows it: where the model is from, how it was trained, what came out."""
        form, settings = self.form, self.settings
        loader, purpose = next((kind for end, kind in _KINDS.items() if form.name.endswith(end)), ("AutoModel", ""))
        front = [] if form.twin is None else ["library_name: transformers"]
        front += [f"pipeline_tag: {purpose}"] if purpose and form.twin is not None else []
        origin = _bare(settings.model or settings.weights or "")
        begun = f"from `{origin}`" if origin and settings.pretrained else f"on task `{settings.task}`"
        lines = ["---", *front, "tags:", "- thinpipe", "---", "", f"# {self.directory.resolve().name}", ""]
        lines += [f"{form.name}, trained {begun} by thinpipe {__version__}.", ""]
        lines += ["```python", *self._use(loader), "```", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in _figures(settings, progress, form.parameters).items()]
        given = {name: value for name, value in settings.to_json().items() if value is not None}
        given = {name: _bare(value) if isinstance(value, str) else value for name, value in given.items()}
        return "\n".join([*lines, "", "## Settings", "", "```json", json.dumps(given, indent=2), "```", ""])

    def _use(self, loader: str) -> list[str]:
        name, has_tokenizer = self.directory.resolve().name, "tokenizer_config.json" in self.files
        if self.form.twin is None:
            file = next(iter(self.form.files))
            return ["from safetensors.torch import load_model", "", f'load_model(model, "{name}/{file}")']
        lines = [f"from transformers import {loader}{', AutoTokenizer' if has_tokenizer else ''}", ""]
        lines += [f'model = {loader}.from_pretrained("{name}")']
        return lines + ([f'tokenizer = AutoTokenizer.from_pretrained("{name}")'] if has_tokenizer else [])

    @property
    def bytes(self) -> int:
        """What the folder takes."""
        return self.form.bytes + sum(map(len, self.files.values()))

    @property
    def notice(self) -> str | None:
        """What a user should know of it."""
        if self.form.twin is not None:
            return None
        return (
            f"{self.form.name} is not a model that transformers could build from a config: {self.directory} gets its "
            "weights and a card, and no config.json"
        )

    def untrained(self, held: Iterable[str], built: nn.Module) -> dict[str, Tensor]:
        """What the model has and no unit, since its forward does not use it: as it was when the run began.

        ``held`` are the names of what units have, ``built`` is the model as the task has built it.
        """
        known = self.form.held.keys() & set(held)
        missing = sorted(self.form.tensors.keys() - {self.form.kept(name) for name in known})
        if missing and self.fill is not None:
            built = built if self.form.twin is None else self.form.twin  # which nobody trains
            self.fill(built, missing)
        values = built.state_dict() if missing else {}
        return {name: values[name].to(self.form.tensors[name].dtype) for name in missing}

    def write(self, tensors: Iterable[tuple[str, Tensor]], progress: Progress, confirm: Callable[[], None]) -> None:
        """The folder. ``confirm`` is asked when all tensors have come, and raises if they are not what they should be.

        OSError if the disk does not take it.
        """
        with ModelFolder(self.directory, self.form) as folder:
            folder.add(self.files)
            folder.add({"README.md": self.card(progress).encode()})
            for name, tensor in tensors:
                folder.put(name, tensor)
            confirm()


class Exporter:
    """Exports at the end of a run; the same on every worker."""

    def __init__(self, engine: Engine, export: Export | None, built: nn.Module) -> None:
        """``export`` is the client's. ValueError there if the workers do not hold the model. A collective."""
        self._engine, self._world, self._export = engine, engine.world, export
        self.path = "" if export is None else str(export.directory)
        self.bytes = 0 if export is None else export.bytes
        self.notices = [] if export is None or export.notice is None else [export.notice]
        self._told: list[dict[str, Any]] = self._world.gather(
            {name: [list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in self._mine().items()}
        )
        self._rest: dict[str, Tensor] = {}
        if export is not None:
            self._check(export.form)
            self._rest = export.untrained((name for theirs in self._told for name in theirs), built)

    def _mine(self) -> dict[str, Tensor]:
        return model_tensors(self._engine) if self._engine.owns_state else {}

    def _check(self, form: ModelForm) -> None:
        """ValueError unless what workers announce is the model's: so much will be received, and no more."""
        for theirs in self._told:
            for name, (shape, dtype) in theirs.items():
                form.check(name, shape, getattr(torch, dtype))

    def export(self, progress: Progress) -> str | None:
        """Why there is no folder, if so: one line, the same on all workers. A collective."""
        ACTIVITY.note("exporting")
        if self._export is None:
            pieces = HashedPieces(tensor_pieces(self._mine().values()))
            send_pieces(pieces, 0, self._world)
            self._world.gather(pieces.hexdigest())
            return self._heard(None)
        received = [HashedPieces(self._receive(worker)) for worker in range(1, self._world.workers)]
        told: list[str] = []

        def confirm() -> None:
            if not told:
                told.extend(self._world.gather(None)[1:])
                changed = [worker for worker, each in enumerate(received, 1) if each.hexdigest() != told[worker - 1]]
                if changed:
                    raise OSError(0, f"the tensors of worker {changed[0]} were changed on their way to the client")

        problem = None
        try:
            self._export.write(self._tensors(received), progress, confirm)
        except (OSError, ValueError) as error:
            problem = _words(error)
            for pieces in received:
                for _ in pieces:  # workers send on, whatever has become of it
                    pass
            if not told:
                self._world.gather(None)
        return self._heard(problem)

    def _receive(self, worker: int) -> Iterator[Tensor]:
        size = sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in self._told[worker].values())
        return receive_pieces(size, worker, self._world)

    def _tensors(self, received: list[HashedPieces]) -> Iterator[tuple[str, Tensor]]:
        yield from self._rest.items()
        yield from self._mine().items()
        coming = []
        for theirs, pieces in zip(self._told[1:], received, strict=True):
            empty = (torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in theirs.values())
            coming.append(zip(theirs, filled(empty, pieces), strict=True))
        # One of each in turn: over thin links all of one worker's take longer than torch lets another wait to send.
        for in_turn in zip_longest(*coming):
            yield from (each for each in in_turn if each is not None)

    def _heard(self, problem: str | None) -> str | None:
        found: str | None = self._world.gather(problem)[0]
        return found


def export_checkpoint(export: Export, built: nn.Module, path: Path, manifest: Manifest) -> None:
    """Export what a checkpoint holds, whose parts have been verified. OSError if the disk does not take it."""
    before, now = manifest.data.get("tensors"), len(export.form.held)
    if before not in (None, now):  # what is missing could not be told from what nothing trains
        raise OptionError(
            f"the run's model had {before} tensors, and {export.form.name} has {now} here: name the run's own {{model}}"
        )
    held = [name for name, _ in _saved_tensors(path, manifest, values=False)]
    rest = export.untrained(held, built)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from rest.items()
        yield from _saved_tensors(path, manifest)

    export.write(tensors(), manifest.progress, lambda: None)


def saved_shape(manifest: Manifest, task: Task, settings: Settings) -> Shape:
    """What the model of a checkpoint was built for."""
    told = manifest.data.get("shape")
    return Shape(**told) if told is not None else task.load(settings.source)[1]


def _saved_tensors(path: Path, manifest: Manifest, *, values: bool = True) -> Iterator[tuple[str, Any]]:
    """The model's tensors in a checkpoint, by their names in the model; mapped, not read."""
    for part in manifest.parts:
        try:
            with safe_open(path / part.name, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, it is no dict
                    if name.startswith(_MODEL):
                        yield name.removeprefix(_MODEL), file.get_tensor(name) if values else None
        except SafetensorError as error:
            raise DamagedError(f"{part.name}: {error}") from None


def _figures(settings: Settings, progress: Progress, parameters: int) -> dict[str, str]:
    figures = {
        "steps": f"{progress.step} of {progress.steps}",
        "validation loss": _figure(progress.validation_loss),
        f"validation {progress.metric_name}": _figure(progress.metric),
        "train loss": _figure(progress.train_loss),
        "parameters": f"{parameters:,}",
    }
    if settings.parallel != "none":
        if settings.parallel == "pipeline":
            figures["codec of activations"] = f"`{settings.compress_forward}`"
        figures["codec of gradients"] = f"`{settings.compress_backward}`"
        figures["sent between workers"] = size_text(progress.wire_bytes)
    return figures


def _bare(text: str) -> str:
    """A path without the folders it is in, which are nobody's business."""
    return Path(text).name if Path(text).is_absolute() else text


def _figure(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not evaluated"


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)
