"""Export of a trained model to a folder that transformers loads, with a card, at the end of a run.

1  before the first step the client has checked all that can fail except the disk: config, tokenizer, who holds what
2  every worker sends its tensors to the client, which writes them as they arrive
3  all workers exchange the hash of what they sent, or their error; only then the folder gets its name
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from thinpipe.comm.control import ACTIVITY
from thinpipe.comm.streams import HashedPieces, fill_tensors, tensor_pieces
from thinpipe.system.sizes import size_text
from thinpipe.system.tensors import dtype_named, empty_tensor, spec_bytes, specs_of
from thinpipe.train.checkpoints.manifest import Progress
from thinpipe.train.checkpoints.state import model_tensors
from thinpipe.train.engines.engine import Engine
from thinpipe.train.models.adapters import (
    Adapted,
    AdapterForm,
    adapter_names,
    exported_names,
    merge,
    plain_name,
    without_adapters,
)
from thinpipe.train.models.quantized import dequantize, plain_tensors
from thinpipe.train.models.save import ModelFolder, ModelForm
from thinpipe.train.models.weights import LoadWeights
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import Task
from thinpipe.version import __version__

_MODEL = "model/"  # prefix of the model's tensors in a checkpoint
# By the suffix of the model's class: the class of transformers that loads it, and the hub's name of its purpose.
_KINDS = {
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
}


@dataclass(frozen=True, kw_only=True)
class Export:
    """The contents of an exported folder that are known before there are trained weights."""

    directory: Path
    form: ModelForm
    settings: Settings
    files: Mapping[str, bytes]  # that belong to the model, as a tokenizer's
    fill: LoadWeights | None  # gives parameters of the model their values; None: it was built with them
    tensors: int  # of the model

    @staticmethod
    def of(directory: Path, model: nn.Module, task: Task, settings: Settings, kept: Mapping[str, bytes]) -> Export:
        """Return the export of a model as it was built for a run. Raise ValueError if it cannot be exported.

        ``kept`` are the companions that the run itself has made: a tokenizer that it has trained.
        """
        return Export(
            directory=directory,
            form=ModelForm(model),
            settings=settings,
            files={**task.companions(settings.source), **kept},
            fill=task.weight_loader(settings.source, settings.seed),
            tensors=len(model.state_dict()),
        )

    def of_adapter(self, adapted: Adapted) -> Export:
        """Return the export of the adapters alone, in the format of peft."""
        form = AdapterForm(adapted, self.settings.model)
        return replace(self, form=form, fill=adapted.loader(self.fill))

    @property
    def is_adapter(self) -> bool:
        return isinstance(self.form, AdapterForm)

    def card(self, progress: Progress) -> str:
        """Return the README of the folder, as the hub shows it: the model's origin, its training, and the results."""
        form, settings = self.form, self.settings
        loader, purpose = next((kind for end, kind in _KINDS.items() if form.name.endswith(end)), ("AutoModel", ""))
        origin = _bare(settings.model or str(settings.weights or ""))
        front = [] if form.twin is None else ["library_name: transformers"]
        front += [f"pipeline_tag: {purpose}"] if purpose and form.twin is not None else []
        front += ["library_name: peft"] if self.is_adapter else []
        if self.is_adapter and settings.model is not None and origin == settings.model:  # a name of the hub
            front.append(f"base_model: {origin}")
        begun = f"from `{origin}`" if origin and settings.pretrained else f"on task `{settings.task}`"
        lines = ["---", *front, "tags:", "- thinpipe", "---", "", f"# {self.directory.resolve().name}", ""]
        what = f"Adapters of {form.name}" if self.is_adapter else form.name
        lines += [f"{what}, trained {begun} by thinpipe {__version__}.", ""]
        use = self._use_adapter(loader, origin) if self.is_adapter else self._use(loader)
        lines += ["```python", *use, "```", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in _results(settings, progress, form.parameters).items()]
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

    def _use_adapter(self, loader: str, origin: str) -> list[str]:
        lines = ["from peft import PeftModel", f"from transformers import {loader}", ""]
        lines += [f'model = {loader}.from_pretrained("{origin or "..."}")']
        return [*lines, f'model = PeftModel.from_pretrained(model, "{self.directory.resolve().name}")']

    @property
    def bytes(self) -> int:
        """The size of the folder."""
        return self.form.bytes + sum(map(len, self.files.values()))

    @property
    def notice(self) -> str | None:
        """A line of warning for the user, or None."""
        if self.form.twin is not None or self.is_adapter:
            return None
        return (
            f"{self.form.name} is not a model that transformers could build from a config: {self.directory} gets its "
            "weights and a card, and no config.json"
        )

    def missing(self, held: Iterable[str]) -> list[str]:
        """Return the names of the model's tensors that are not among ``held``.

        The forward does not use them, or they are frozen and in no checkpoint.
        """
        known = self.form.held.keys() & set(held)
        return sorted(self.form.tensors.keys() - {self.form.kept(name) for name in known})

    def untrained(self, names: Sequence[str], built: nn.Module) -> dict[str, Tensor]:
        """Return tensors as they were when the run began; ``built`` is the model as it was built for the run."""
        if not names:
            return {}
        if self.form.twin is not None and self.fill is not None:
            built = self.form.twin  # never trained
        with nullcontext() if self.is_adapter else without_adapters(built):
            if self.fill is not None:
                self.fill(built, names)
            values = built.state_dict()
        return {name: values[name].to(self.form.tensors[name].dtype) for name in names}

    def write(self, tensors: Iterable[tuple[str, Tensor]], progress: Progress, confirm: Callable[[], None]) -> None:
        """Write the folder. ``confirm`` is called when all tensors have arrived, and raises if they are wrong.

        Raise OSError if writing to the disk fails.
        """
        with ModelFolder(self.directory, self.form) as folder:
            folder.add(self.files)
            folder.add({"README.md": self.card(progress).encode()})
            for name, tensor in tensors:
                folder.put(name, tensor)
            confirm()


class Exporter:
    """The export at the end of a run; the same on every worker."""

    def __init__(self, engine: Engine, export: Export | None, built: nn.Module, *, with_adapters: bool = False) -> None:
        """Prepare the export; ``export`` is None except on the client. A collective.

        Raise ValueError on the client if the workers do not hold the model. If ``built`` has adapters, they are
        exported alone; or, ``with_adapters``, merged into the model's weights.
        """
        self._engine, self._world, self._export, self._merge = engine, engine.world, export, with_adapters
        self._adapters = frozenset(adapter_names(built) if with_adapters else exported_names(built))
        self.path = "" if export is None else str(export.directory)
        self.bytes = 0 if export is None else export.bytes
        self.notices = [] if export is None or export.notice is None else [export.notice]
        self._announced: list[dict[str, Any]] = self._world.gather(specs_of(self._mine()))
        self._rest: dict[str, Tensor] = {}
        if export is not None:
            self._check(export.form)
            missing = export.missing(name for theirs in self._announced for name in theirs)
            self._rest = export.untrained(missing, built)

    def _mine(self) -> dict[str, Tensor]:
        tensors = model_tensors(self._engine) if self._engine.owns_state else {}
        if self._merge:
            tensors = plain_tensors(tensors, (stage.module for stage in self._engine.stages.values()))
            return {plain_name(name): each for name, each in tensors.items() if name not in self._adapters}
        return {name: each for name, each in tensors.items() if name in self._adapters} if self._adapters else tensors

    def _check(self, form: ModelForm) -> None:
        """Raise ValueError unless the tensors that workers announce are the model's; this bounds what is received."""
        for theirs in self._announced:
            for name, (shape, dtype) in theirs.items():
                form.check(name, shape, dtype_named(dtype))

    def export(self, progress: Progress) -> str | None:
        """Export the model; return None, or one line why it failed, the same on all workers. A collective."""
        ACTIVITY.note("exporting")
        if self._merge:
            for stage in self._engine.stages.values():
                dequantize(stage.module)
                merge(stage.module)  # in place, without more memory; they are not needed separately any more
        if self._export is None:
            self._world.gather(self._world.control.send_pieces(tensor_pieces(self._mine().values()), 0))
            return self._agreed(None)
        received = [HashedPieces(self._receive(worker)) for worker in range(1, self._world.workers)]
        hashes: list[str] = []

        def confirm() -> None:
            if not hashes:
                hashes.extend(self._world.gather(None)[1:])
                changed = [worker for worker, each in enumerate(received, 1) if each.hexdigest() != hashes[worker - 1]]
                if changed:
                    raise OSError(0, f"the tensors of worker {changed[0]} were changed on their way to the client")

        problem = None
        try:
            self._export.write(self._tensors(received), progress, confirm)
        except (OSError, ValueError) as error:
            problem = _reason(error)
            for pieces in received:
                for _ in pieces:  # drain: workers keep sending after an error
                    pass
            if not hashes:
                self._world.gather(None)
        return self._agreed(problem)

    def _receive(self, worker: int) -> Iterator[Tensor]:
        return self._world.control.receive_pieces(sum(map(spec_bytes, self._announced[worker].values())), worker)

    def _tensors(self, received: list[HashedPieces]) -> Iterator[tuple[str, Tensor]]:
        yield from self._rest.items()
        yield from self._mine().items()
        coming = []
        for theirs, pieces in zip(self._announced[1:], received, strict=True):
            coming.append(zip(theirs, fill_tensors(map(empty_tensor, theirs.values()), pieces), strict=True))
        # Round-robin: over slow links one worker's tensors take longer than torch's timeout for another worker's send.
        for in_turn in zip_longest(*coming):
            yield from (each for each in in_turn if each is not None)

    def _agreed(self, problem: str | None) -> str | None:
        found: str | None = self._world.gather(problem)[0]
        return found


def _results(settings: Settings, progress: Progress, parameters: int) -> dict[str, str]:
    results = {
        "steps": f"{progress.step} of {progress.steps}",
        "validation loss": _metric_text(progress.validation_loss),
        f"validation {progress.metric_name}": _metric_text(progress.metric),
        "train loss": _metric_text(progress.train_loss),
        "parameters": f"{parameters:,}",
    }
    if settings.parallel != "none":
        if settings.parallel == "pipeline":
            results["codec of activations"] = f"`{settings.compress_forward}`"
        results["codec of gradients"] = f"`{settings.compress_backward}`"
        results["sent between workers"] = size_text(progress.wire_bytes)
    return results


def _bare(text: str) -> str:
    """Return an absolute path's last component, so that private folders are not published; other text unchanged."""
    return Path(text).name if Path(text).is_absolute() else text


def _metric_text(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not evaluated"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)
