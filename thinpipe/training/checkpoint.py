"""Checkpoints on disk: whole or not there.

DIR/.lock                     held by the client while a run saves here
DIR/step-00000120/            complete: a folder gets this name when all is in it
  part-0.safetensors ...      each worker's tensors
  manifest.json               step, settings, progress, and the parts with their sizes and hashes
DIR/step-00000240.partial/    being written, being deleted, or left by a run that was ended meanwhile
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from thinpipe.options import OptionError
from thinpipe.training.manifest import NAME, Manifest, read_manifest
from thinpipe.training.part import DamagedError, read_part

PARTIAL = ".partial"


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def is_complete(path: Path) -> bool:
    return path.suffix != PARTIAL and (path / NAME).is_file()


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(path for path in directory.glob("step-*") if is_complete(path))


def candidates(path: Path) -> list[Path]:
    """The checkpoints a user may mean by a path: this one; or those in this folder, the newest first.

    Among them are those that have lost their manifest: whoever takes an older one instead should say why.
    """
    if is_complete(path):
        return [path]
    if not checkpoints(path):
        raise OptionError(
            f"{{resume}} takes a folder that a run was saved in, or one checkpoint of it; {path} has no complete "
            "checkpoint. Start the run again without {resume}; if the client alone has it, give {save_local} too"
        )
    found = [each for each in path.glob("step-*") if each.is_dir() and re.fullmatch(r"step-\d{8,}", each.name)]
    return sorted(found, reverse=True)


def newest(path: Path) -> Path:
    """The checkpoint a user means, if it is not damaged: this one, or the newest in this folder."""
    return next(each for each in candidates(path) if is_complete(each))


def newest_manifest(path: Path) -> tuple[Path, Manifest]:
    """The newest one that has a manifest as it was written, and that manifest; ValueError if none has."""
    damages: list[tuple[Path, str]] = []
    for each in candidates(path):
        try:
            return each, read_manifest(each)
        except DamagedError as error:
            damages.append((each, str(error)))
    raise ValueError(all_damaged(path, damages))


def all_damaged(path: Path, damages: list[tuple[Path, str]]) -> str:
    """What to say of a path none of whose checkpoints can be read."""
    if damages and damages[0][0] == path:  # the user named this very one
        others = [each.name for each in reversed(checkpoints(path.parent)) if each != path]
        advice = f"others in {path.parent}: {', '.join(others)}" if others else f"there is no other in {path.parent}"
        return f"{path} is damaged: {damages[0][1]}; {advice}"
    lines = [f"  {each.name}: {damage}" for each, damage in damages]
    return f"all checkpoints in {path} are damaged:\n" + "\n".join(lines)


def load(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names are wanted, on the CPU. DamagedError if they are not what was saved."""
    state: dict[str, Tensor] = {}
    for part in read_manifest(path).parts:
        state |= read_part(path, part, wanted)
    return state


def delete(path: Path) -> None:
    """Half a checkpoint must never look like a whole one."""
    partial = path.with_name(f"{path.name}.old{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


def sync(directory: Path) -> None:
    """A name is on disk when its folder is."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
