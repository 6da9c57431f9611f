"""The preflight check of output files: everything a run will write is tested before training, not after it."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from thinpipe.lab.records.record import check_writable
from thinpipe.options import flag
from thinpipe.train.models.save import check_new_folder

SMALL_BYTES = 1 << 20  # lower bound on the size of a record, a trace or curves


class Output(NamedTuple):
    """An output file or folder, and the option that names it."""

    option: str
    path: Path
    check: Callable[[Path], None] | None  # checks a file in a directory; None: the path is the directory
    bytes: int


def preflight(
    *,
    log: Path | None = None,
    json: Path | None = None,
    save: Path | None = None,
    trace: Path | None = None,
    capture: Path | None = None,
    export: Path | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Test all outputs of a run and make their directories; raise ValueError for the first that fails.

    ``sizes`` are the maximum sizes of outputs in bytes, by name; for checkpoints one more than are kept, since a new
    one is complete before the oldest is removed. After an error the directories made here are removed.
    """
    asked = (
        ("log", log, None),
        ("save", save, None),
        ("json", json, check_writable),
        ("trace", trace, check_writable),
        ("capture", capture, check_writable),
        ("export", export, check_new_folder),
    )
    known = sizes or {}
    check_outputs([Output(flag(name), path, check, known.get(name, 0)) for name, path, check in asked if path])


def check_outputs(outputs: Iterable[Output]) -> None:
    """Test any outputs, as ``preflight`` does."""
    made: list[Path] = []
    needs: dict[int, list[tuple[str, Path, int]]] = defaultdict(list)  # by file system
    try:
        for option, path, check, size in outputs:
            directory = path if check is None else path.absolute().parent
            _make_directory(option, directory, made)
            _try_writing(option, directory)
            if check is not None:
                check(path)
            needs[directory.stat().st_dev].append((option, directory, max(size, SMALL_BYTES)))
        for each in needs.values():
            _check_room(each)
    except ValueError:
        for directory in reversed(made):
            directory.rmdir()
        raise


def _make_directory(option: str, directory: Path, made: list[Path]) -> None:
    """Make a directory and its parents; append those that were missing to ``made``."""
    missing = []
    at = directory.absolute()
    while not os.path.lexists(at):
        missing.append(at)
        at = at.parent
    try:
        for each in reversed(missing):
            each.mkdir()
            made.append(each)
        os.scandir(directory).close()
    except OSError as error:
        raise ValueError(
            f"{option} needs a directory that is there or can be made; {error.filename}: {error.strerror}. "
            f"Name another place"
        ) from None


def _try_writing(option: str, directory: Path) -> None:
    """Write a file and remove it. It must not be empty: a full disk still accepts empty files."""
    probe = directory / f".thinpipe.{os.getpid()}.tmp"
    try:
        with probe.open("xb") as file:
            try:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            finally:
                probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{option} needs a directory that can be written; {directory}: {error.strerror}. "
            f"Change its permissions, make room, or name another place"
        ) from None


def _check_room(outputs: list[tuple[str, Path, int]]) -> None:
    """Raise ValueError if the outputs on one file system need more bytes than are free."""
    directory = outputs[0][1]
    needed, free = sum(size for _, _, size in outputs), shutil.disk_usage(directory).free
    if needed > free:
        options = " and ".join(option for option, _, _ in outputs)
        raise ValueError(
            f"{options} will need {needed / 1e6:.1f} MB in {directory}, where {free / 1e6:.1f} MB are free. "
            f"Make room, name another place, or keep fewer checkpoints or captured steps"
        )
