"""The preflight check of output files: everything that a run will write is tested before training, not after it."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from thinpipe.options import flag, named
from thinpipe.system.files import check_writable
from thinpipe.train.models.save import check_new_folder

SMALL_BYTES = 1 << 20  # lower bound on the size of a record, a trace or curves
_CHECKS = {  # option -> test of its file, whose directory is made; None: the option names a directory
    "log": None,
    "save": None,
    "json": check_writable,
    "save_config": check_writable,
    "trace": check_writable,
    "capture": check_writable,
    "export": check_new_folder,
}


class Output(NamedTuple):
    """An output file or folder, and the option that names it."""

    option: str
    path: Path
    check: Callable[[Path], None] | None
    bytes: int = 0

    @property
    def directory(self) -> Path:
        return self.path if self.check is None else self.path.absolute().parent

    @property
    def existing(self) -> Path:
        """The directory, or the closest parent that exists."""
        at = self.directory.absolute()
        return next(each for each in (at, *at.parents) if each.exists())


def preflight(**paths: Path | None) -> None:
    """Test all outputs of a run, by option, and make their directories; raise ValueError for the first that fails.

    After an error the directories made here are removed.
    """
    check_outputs([Output(flag(name), path, _CHECKS[name]) for name, path in paths.items() if path is not None])


def check_space(paths: Mapping[str, Path | None], sizes: Mapping[str, int]) -> None:
    """Raise ValueError if outputs that ``preflight`` has tested, by option, need more bytes than are free."""
    _check_space(
        Output(named(f"{{{name}}}"), path, _CHECKS[name], sizes[name])
        for name, path in paths.items()
        if path is not None
    )


def check_outputs(outputs: Iterable[Output]) -> None:
    """Test any outputs, as ``preflight`` does."""
    made: list[Path] = []
    tested = []
    try:
        for each in outputs:
            _make_directory(each.option, each.directory, made)
            _try_writing(each.option, each.directory)
            if each.check is not None:
                each.check(each.path)
            tested.append(each)
        _check_space(tested)
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
            f"Change its permissions, free some space, or name another place"
        ) from None


def _check_space(outputs: Iterable[Output]) -> None:
    """Raise ValueError if the outputs on one file system need more bytes than are free there."""
    by_device: dict[int, list[Output]] = defaultdict(list)
    for each in outputs:
        by_device[each.existing.stat().st_dev].append(each)
    for together in by_device.values():
        needed = sum(max(each.bytes, SMALL_BYTES) for each in together)
        free = shutil.disk_usage(together[0].existing).free
        if needed > free:
            options = " and ".join(each.option for each in together)
            raise ValueError(
                f"{options} will need {needed / 1e6:.1f} MB in {together[0].directory}, where {free / 1e6:.1f} MB are "
                "free. Free some space, name another place, or keep fewer checkpoints or captured steps"
            )
