"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write what is to be at ``path``: it gets there when the block has ended without an error."""
    temporary = temporary_beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_beside(path: Path) -> Path:
    """A name on the same file system, so that renaming it is atomic; it ends alike, which tells writers the format."""
    return path.with_name(f".{os.getpid()}.tmp.{path.name}")


def sync(directory: Path) -> None:
    """A name is on disk when its folder is."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
