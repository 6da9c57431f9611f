"""Checkpoints on disk: whole or not there, the newest few kept.

    DIR/step-00000120/            complete: a folder gets this name when all is in it
      manifest.json               step, settings, progress
      .metadata, __0_0.distcp ... torch.distributed.checkpoint's: each worker's tensors
    DIR/step-00000240.partial/    being written, being deleted, or left by a run that was ended meanwhile

1  worker 0 makes a fresh .partial folder; the others wait
2  every worker writes its tensors, synced to disk
3  worker 0 writes the manifest, synced too, and renames the folder
4  older ones are renamed to .partial, then deleted
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from thinpipe.training.place import Place
from thinpipe.training.progress import Progress
from thinpipe.training.settings import Settings
from thinpipe.version import __version__

FORMAT = 1  # of the manifest and of the names of tensors
_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself."""

    settings: Settings
    progress: Progress

    def write(self, path: Path) -> None:
        facts = {
            "format": FORMAT,
            "thinpipe": __version__,
            "torch": torch.__version__,
            "settings": self.settings.to_json(),
            "progress": asdict(self.progress),
        }
        with path.open("w") as file:
            json.dump(facts, file, indent=2)
            file.flush()
            os.fsync(file.fileno())


def save(directory: Path, manifest: Manifest, state: dict[str, Tensor], place: Place, *, keep: int) -> Path:
    """Write one checkpoint and let go of those beyond the newest ``keep``. A collective; returns its path."""
    path = directory / f"step-{manifest.progress.step:08d}"
    partial = path.with_name(path.name + _PARTIAL)
    if place.is_client:
        if path.exists():  # of a run that was resumed from an older one
            _delete(path)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    place.barrier()
    writer = dcp.FileSystemWriter(partial, sync_files=True)
    with _quiet():
        dcp.save(state, storage_writer=writer, process_group=place.words, no_dist=place.workers == 1)
    if place.is_client:
        manifest.write(partial / "manifest.json")
        _sync(partial)
        partial.rename(path)
        _sync(directory)
        found = checkpoints(directory)
        here = found.index(path)
        # Later ones are of a run that was resumed from before them: it comes by there again.
        for other in found[: max(here + 1 - keep, 0)] + found[here + 1 :]:
            _delete(other)
    return path


def load(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names are wanted, on the CPU."""
    reader = dcp.FileSystemReader(path)
    state: dict[str, Any] = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in reader.read_metadata().state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata) and wanted(name)
    }
    with _quiet():
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(path for path in directory.glob("step-*") if path.suffix != _PARTIAL and _is_complete(path))


def newest(path: Path) -> Path:
    """The checkpoint a user means: this one, or the newest in this folder."""
    if _is_complete(path):
        return path
    found = checkpoints(path)
    if not found:
        raise ValueError(
            f"--resume takes a folder that a run was saved in, or one checkpoint of it; {path} has no complete "
            "checkpoint. Start the run again without --resume"
        )
    return found[-1]


def read_manifest(path: Path) -> Manifest:
    facts = json.loads((path / "manifest.json").read_text())
    if facts["format"] != FORMAT:
        raise ValueError(
            f"{path} was saved by thinpipe {facts['thinpipe']} in format {facts['format']}, this one reads {FORMAT}; "
            "resume with the version that saved it"
        )
    return Manifest(settings=Settings.from_json(facts["settings"]), progress=Progress(**facts["progress"]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch warns where it works without a group: one worker alone, or each reading for itself. That is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _is_complete(path: Path) -> bool:
    return path.suffix != _PARTIAL and (path / "manifest.json").is_file()


def _delete(path: Path) -> None:
    """Half a checkpoint must never look like a whole one."""
    partial = path.with_name(path.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


def _sync(directory: Path) -> None:
    """A name is on disk when its folder is."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
