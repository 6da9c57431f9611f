"""Whether everything a run will write can be written: found out before training, not after it."""

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

SMALL_BYTES = 1 << 20  # what a record, a trace or the curves of a run need at the least


class Output(NamedTuple):
    """What will be written, and who asked for it."""

    option: str
    path: Path
    check: Callable[[Path], None] | None  # of what is put into a directory under this name; None: it is the directory
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
    """Try every output of a run, and make the directories it needs; ValueError for the first that fails.

    ``sizes`` are what outputs take at their most, in bytes, by their names: of checkpoints one more than are kept,
    since a new one is whole before the oldest goes. After an error nothing is left of what was made here.
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
    """The same for any outputs."""
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
    """Make the directory and those above it; ``made`` is told which were not there."""
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
    """Put a file there and take it away. Its bytes matter: a full disk still takes empty files."""
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
    """Hold what all outputs on one file system need against what is free there."""
    directory = outputs[0][1]
    needed, free = sum(size for _, _, size in outputs), shutil.disk_usage(directory).free
    if needed > free:
        options = " and ".join(option for option, _, _ in outputs)
        raise ValueError(
            f"{options} will need {needed / 1e6:.1f} MB in {directory}, where {free / 1e6:.1f} MB are free. "
            f"Make room, name another place, or keep fewer checkpoints or captured steps"
        )
