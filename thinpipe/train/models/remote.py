"""Folders whose tensors another machine has: a loader asks for those that it is about to read, and they are fetched.

Every reader of weights passes through ``fetched``: ``load_weights`` for models, ``load_adapters`` for adapters. It does
nothing unless ``remote_folders`` has registered the folder: on a server to fetch tensors, on the client to find out
which of them each server needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

InFiles = Callable[[Collection[str]], Callable[[str], bool]]  # names of a model -> whether a tensor of a file has one


class RemoteTensors(Protocol):
    """The tensors of one folder of another machine."""

    digest: str | None  # of the file of adapters on the machine that has it

    def fetch(self, is_wanted: Callable[[str], bool]) -> Path:
        """Return a folder that has the wanted tensors, by their names in its files; raise ValueError if none can."""
        ...


class SharedTensors(Protocol):
    """The tensors of one folder of this machine, which others fetch."""

    def grant(self, wanted: Collection[str], in_files: InFiles, parts: Mapping[int, Collection[str]]) -> None:
        """Note which tensors each worker loads: those of its part of the model, or all that this one loads."""
        ...


_REMOTE: dict[Path, RemoteTensors] = {}  # of this process
_SHARED: dict[Path, SharedTensors] = {}
_PARTS: dict[int, Collection[str]] = {}
_LOADED: list[Callable[[], None]] = []


@contextmanager
def remote_folders(
    folders: Mapping[Path, RemoteTensors],
    loaded: Callable[[], None],
    shared: Mapping[Path, SharedTensors] = {},
) -> Iterator[None]:
    """Register folders; ``loaded`` is called when this process has loaded all weights of a run."""
    _REMOTE.update(folders)
    _SHARED.update(shared)
    _LOADED.append(loaded)
    try:
        yield
    finally:
        _LOADED.remove(loaded)
        _PARTS.clear()
        for folder in folders:
            del _REMOTE[folder]
        for folder in shared:
            del _SHARED[folder]


def remote_folder(folder: Path) -> RemoteTensors | None:
    return _REMOTE.get(folder)


def note_parts(parts: Mapping[int, Collection[str]]) -> None:
    """Note the names of the parameters of every worker's part of the model, before any of them is loaded."""
    if _SHARED:
        _PARTS.update(parts)


def fetched(folder: Path, wanted: Collection[str], in_files: InFiles) -> Path:
    """Return the folder to read tensors from, by their names in a model: this one, unless it is registered."""
    if folder in _SHARED:
        _SHARED[folder].grant(wanted, in_files, _PARTS)
    remote = _REMOTE.get(folder)
    return folder if remote is None else remote.fetch(in_files(wanted))


def all_loaded() -> None:
    """End the fetching of tensors; raise ValueError if it has failed. Call it on all workers, with ``together``."""
    for loaded in _LOADED:
        loaded()
