"""Folders whose tensors another machine has: a loader asks for those that it is about to read, and they are fetched.

Every reader of weights passes through ``fetched``: ``load_weights`` for models, ``load_adapters`` for adapters. Both do
nothing here unless ``remote_folders`` has registered the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class RemoteTensors(Protocol):
    """The tensors of one folder."""

    digest: str | None  # of the file of adapters on the machine that has it

    def fetch(self, is_wanted: Callable[[str], bool]) -> Path:
        """Return a folder that has the wanted tensors, by their names in its files; raise ValueError if none can."""
        ...


_REMOTE: dict[Path, RemoteTensors] = {}  # of this process
_LOADED: list[Callable[[], None]] = []


@contextmanager
def remote_folders(folders: Mapping[Path, RemoteTensors], loaded: Callable[[], None]) -> Iterator[None]:
    """Register folders; ``loaded`` is called when this process has loaded all weights of a run."""
    _REMOTE.update(folders)
    _LOADED.append(loaded)
    try:
        yield
    finally:
        _LOADED.remove(loaded)
        for folder in folders:
            del _REMOTE[folder]


def remote_folder(folder: Path) -> RemoteTensors | None:
    return _REMOTE.get(folder)


def fetched(folder: Path, is_wanted: Callable[[str], bool]) -> Path:
    """Return the folder to read the wanted tensors from: this one, unless it is registered."""
    remote = _REMOTE.get(folder)
    return folder if remote is None else remote.fetch(is_wanted)


def all_loaded() -> None:
    """End the fetching of tensors; raise ValueError if it has failed. Call it on all workers, with ``together``."""
    for loaded in _LOADED:
        loaded()
