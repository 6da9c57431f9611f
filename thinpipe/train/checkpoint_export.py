"""Export of the newest undamaged checkpoint of a run, without workers: tensors are read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from thinpipe.options import OptionError, read
from thinpipe.system.files import read_folder
from thinpipe.train.checkpoints.best import follow_best
from thinpipe.train.checkpoints.folder import companions_of, newest_undamaged
from thinpipe.train.checkpoints.manifest import Manifest
from thinpipe.train.checkpoints.part import DamagedError
from thinpipe.train.export import Export
from thinpipe.train.models.adapters import adapt, adapter_names, merged
from thinpipe.train.models.quantized import check_installed, quantized_and_back
from thinpipe.train.models.save import check_new_folder
from thinpipe.train.models.weights import release
from thinpipe.train.preflight import Output, check_outputs
from thinpipe.train.resolve import check_saved, resolve_for_resume
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import Shape, Task
from thinpipe.train.tasks.tasks import task as find_task

_MODEL = "model/"  # prefix of the model's tensors in a checkpoint


@dataclass(frozen=True, kw_only=True)
class CheckpointExport:
    """An export that has been checked, and the checkpoint that it is made from, whose parts have been verified."""

    export: Export
    built: nn.Module  # the model as it was built for the run, with adapters if it trained them
    path: Path
    manifest: Manifest
    merge: bool  # merge adapters into the model's weights
    quantized: bool  # which the run held in 4 bits
    notices: list[str]

    @property
    def summary(self) -> str:
        progress = self.manifest.progress
        return f"{self.export.form.name}, step {progress.step} of {progress.steps}"

    def write(self) -> None:
        """Write the folder. Raise OSError if writing to the disk fails."""
        export = self.export
        before, now = self.manifest.data.get("tensors"), export.tensors
        if before not in (None, now):  # missing tensors would be indistinguishable from untrained ones
            raise OptionError(
                f"the run's model had {before} tensors, and {export.form.name} has {now} here: name the run's own "
                "{model}"
            )
        added = set(adapter_names(self.built)) if self.merge else set()
        held = [name for name, _ in _saved_tensors(self.path, self.manifest, values=False) if name not in added]
        missing = set(export.missing(held))
        adapters = {name: each for name, each in _saved_tensors(self.path, self.manifest) if name in added}

        def tensors() -> Iterator[tuple[str, Tensor]]:
            yield from (each for each in _saved_tensors(self.path, self.manifest) if each[0] not in added)
            for group in export.form.groups.values():  # only one group at a time is in memory
                names = [name for name in group if name in missing]
                values = export.untrained(names, self.built)
                if self.quantized:
                    values = quantized_and_back(values, self.built)
                yield from (merged(self.built, values, adapters) if added else values).items()
                if export.form.twin is not None and export.fill is not None:
                    release(export.form.twin, names)

        export.write(tensors(), self.manifest.progress, lambda: None)


def prepare_export(run: Path, directory: Path, moved: Mapping[str, Any], *, merge: bool) -> CheckpointExport:
    """Check the export of a run to a new folder; raise ValueError if it cannot be done.

    ``moved`` are options with the new locations of files that the run has read. ``merge``: merge adapters into the
    weights of the model.
    """
    run = follow_best(run)
    check_saved("RUN", run)
    check_new_folder(directory)  # before checkpoints are read, which takes a while
    path, manifest, damages = newest_undamaged(run)
    settings = resolve_for_resume(read(Settings, moved), manifest.settings)
    settings.check_export(merge=merge)
    if merge and settings.quantize is not None:
        check_installed()
    task = find_task(settings.task)
    torch.manual_seed(settings.seed)
    built = task.build(_saved_shape(manifest, task, settings), settings.source)
    folder = companions_of(path)
    export = Export.of(directory, built, task, settings, {} if folder is None else read_folder(folder))
    adapted = adapt(built, settings.adapters, settings.freeze, settings.seed)
    if adapted.config is not None and not merge:
        export = export.of_adapter(adapted)
    check_outputs([Output("DIR", directory, check_new_folder, export.bytes)])
    notices = [f"{each.name} is damaged: {damage}; taking {path.name}" for each, damage in damages]
    notices += [] if export.notice is None else [export.notice]
    return CheckpointExport(
        export=export,
        built=built,
        path=path,
        manifest=manifest,
        merge=merge,
        quantized=merge and settings.quantize is not None,
        notices=notices,
    )


def _saved_shape(manifest: Manifest, task: Task, settings: Settings) -> Shape:
    """Return the data shape that the model of a checkpoint was built for."""
    shape = manifest.data.get("shape")
    return Shape(**shape) if shape is not None else task.load(settings.source)[1]


def _saved_tensors(path: Path, manifest: Manifest, *, values: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the model's tensors in a checkpoint with their names in the model; memory-mapped, not read."""
    for part in manifest.parts:
        try:
            with safe_open(path / part.name, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, it is no dict
                    if name.startswith(_MODEL):
                        yield name.removeprefix(_MODEL), file.get_tensor(name) if values else None
        except SafetensorError as error:
            raise DamagedError(f"{part.name}: {error}") from None
