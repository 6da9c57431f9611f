"""The model files of a run with servers: configuration, weights and adapters come from the client.

      client                                       server
    1 describe_files: the manifest        ------>  place_files: checks it, and makes a folder in the cache
    2                                              place_settings: settings in which paths are those folders
    3 serve_files: a thread per server             fetch_files: registers the folders with the loaders (remote.py)
    4 loads its own layers                <------  a loader names the tensors of its layers: ``FetchedFolder.fetch``
    5                                     ------>  hashes, and the blocks that the server does not have (transfer.py)
    6 all_loaded                                   all_loaded: the service ends before the first step

Nothing of a client runs on a server: models that come with code, functions, tasks and codecs named as
``package.module:object`` are rejected on both sides, before any of them is imported. Checkpoints stay with the client,
as with ``save_local``. A server reads and writes in its cache folder, and reads the folders that its owner names. Tasks
with a checkpoint of their own (``weights``) build the complete model on every worker, so servers fetch all of it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinpipe.comm.errors import LinkError
from thinpipe.comm.group import FILE_TAG, Group
from thinpipe.comm.membership import print_line
from thinpipe.options import OptionError
from thinpipe.system.imports import is_object_name
from thinpipe.train.models.identity import folder_identity
from thinpipe.train.models.remote import remote_folders
from thinpipe.train.running import RunOptions
from thinpipe.train.serve.file_manifest import CONFIG, FolderFiles, describe_folder, find_folders, from_json, to_json
from thinpipe.train.serve.model_cache import CachedFolder, ModelCache
from thinpipe.train.serve.transfer import FetchedFolder, FileService, Granted, Report
from thinpipe.train.tasks.sources import is_model_type
from thinpipe.train.tasks.task import Source, Task

_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]")  # in a codec's spec: a class to import
_NAMES, _SPECS = ("task", "model", "config", "tokenizer"), ("compress", "compress_forward", "compress_backward")
_PATHS = ("data", "validation", "model", "config", "tokenizer", "chat_template", "weights", "adapter")
_NOWHERE = Path(os.devnull, "client")  # the place of the client's files on a server: nothing can be there
_END_S = 5.0  # for all services to end after an error
_MOST_COMPARED = 2  # own copies of a model that are read in full


@dataclass(frozen=True)
class ClientFiles:
    """The folders of the client that its servers need, and what is in them."""

    folders: Mapping[str, tuple[Path, FolderFiles]]

    def manifest(self) -> dict[str, Any]:
        """Return the manifest as JSON."""
        return to_json({name: files for name, (_, files) in self.folders.items()})


def describe_files(source: Source, task: Task | None = None, adapter: Path | None = None) -> ClientFiles:
    """(1) Return the files that servers need; raise ValueError if one cannot be sent. ``task``: None to generate."""
    found = find_folders(source, task, adapter)
    return ClientFiles(
        {name: (folder, describe_folder(name, folder, weights=has)) for name, (folder, has) in found.items()}
    )


def check_settings(given: Mapping[str, Any]) -> None:
    """Raise OptionError for settings, as JSON, that cannot be those of a run with servers, on either side."""
    code = [name for name in _NAMES if is_object_name(str(given.get(name)))]
    code += [name for name in _SPECS if _OBJECT.search(str(given.get(name)))]
    if code:
        raise OptionError(
            f"servers run no code of a client, and {{{code[0]}}} {given[code[0]]} names some: take one that thinpipe "
            "or transformers has, or start all workers by hand, with {rank} and {master}"
        )
    if given.get("trust_remote_code"):
        raise OptionError(
            "servers run no code of a client: leave out {trust_remote_code}, or start all workers by hand"
        )
    if given.get("parallel", "pipeline") != "pipeline" or given.get("layout", "client-server") != "client-server":
        raise OptionError(
            "servers get no data, and other workers than the client would read it: take {parallel} pipeline with "
            "{layout} client-server"
        )


@dataclass(frozen=True)
class PlacedFiles:
    """The folders of a run on a server, locked until ``close``."""

    cached: Mapping[str, CachedFolder]
    own: Mapping[str, list[Path]]  # folders of the server's owner that may have the same tensors

    def close(self) -> None:
        for each in self.cached.values():
            each.close()


def place_files(manifest: Any, cache: ModelCache, own_folders: Iterable[Path], *, worker: int) -> PlacedFiles:
    """(1) Make the folders of a manifest in the cache; raise ValueError if it is invalid, before anything is written.

    ``own_folders``: folders of models, or of folders of models, that the server's owner has. ``worker``: its number.
    """
    folders = from_json(manifest)
    given = list(own_folders)
    own = {name: _same_folders(files, given) for name, files in folders.items()}
    with ExitStack() as opened:
        cached = {}
        for name, files in folders.items():
            cached[name] = cache.open(files, worker)
            opened.callback(cached[name].close)
        opened.pop_all()
    return PlacedFiles(cached, own)


def _same_folders(files: FolderFiles, own_folders: Sequence[Path]) -> list[Path]:
    """Return the folders with the same config and sketch; tensors are compared when they are needed."""
    found = []
    for folder in (each for own in own_folders if own.is_dir() for each in (own, *sorted(own.iterdir()))):
        with suppress(ValueError, OSError):  # no model, or not readable
            config = folder_identity(folder, weights=False)
            is_same = files.tensors and config.get(CONFIG) == files.identity.get(CONFIG, "")
            if is_same and folder_identity(folder, weights=True) == files.identity:
                found.append(folder)
    return found[:_MOST_COMPARED]


def place_settings(given: Mapping[str, Any], placed: PlacedFiles) -> dict[str, Any]:
    """(2) Return a client's settings, as JSON, with the server's paths; raise OptionError for what cannot be used."""
    check_settings(given)
    paths: dict[str, str | None] = {name: None for name in _PATHS if name in given}
    if isinstance(given.get("config"), str) and is_model_type(given["config"]):
        paths["config"] = given["config"]
    paths |= {name: str(each.folder) for name, each in placed.cached.items() if name in given}
    missing = [name for name in ("model", "config", "adapter") if given.get(name) is not None and paths[name] is None]
    if missing:
        raise OptionError(f"the manifest has no files for {{{missing[0]}}}: use the same version of thinpipe")
    return {**given, **paths}


def place_running(running: RunOptions) -> RunOptions:
    """(2) Return the client's options of execution for a server: it opens none of the client's files."""
    capture = running.capture
    places: dict[str, Any] = {
        name: _NOWHERE for name in ("save", "resume", "export") if getattr(running, name) is not None
    }
    return replace(
        running,
        **places,
        save_local=running.save is not None,
        trace=None if running.trace is None else _NOWHERE.with_suffix(".json"),
        capture=None if capture is None else replace(capture, path=_NOWHERE.with_suffix(".safetensors")),
        activation_cache=None,
    )


@contextmanager
def serve_files(files: ClientFiles, group: Group, report: Report = print_line) -> Iterator[list[FileService]]:
    """(3) Answer the requests of all servers in this context, until they have loaded their layers."""
    servers = range(1, group.size) if files.folders else ()
    shared: dict[Path, Granted] = {}
    for folder, described in files.folders.values():
        if described.tensors:
            shared.setdefault(folder, Granted(described))
    folders = {
        name: (folder, described, shared[folder])
        for name, (folder, described) in files.folders.items()
        if described.tensors
    }
    services = [FileService(group, server, folders, report) for server in servers]

    def close() -> None:
        for granted in shared.values():
            granted.close()

    def loaded() -> None:
        close()
        for service in services:
            service.wait()

    with remote_folders({}, loaded, shared):
        try:
            yield services
        finally:
            close()
            deadline = time.monotonic() + _END_S
            for service in services:
                service.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def fetch_files(placed: PlacedFiles, group: Group, report: Report = print_line) -> Iterator[dict[str, FetchedFolder]]:
    """(3) Fetch tensors from the client, worker 0 of ``group``, when a loader in this context needs them."""
    fetched = {
        name: FetchedFolder(name, cached, placed.own[name], group, report) for name, cached in placed.cached.items()
    }
    done = [not fetched]

    def loaded() -> None:
        if not done[0]:
            done[0] = True
            group.send_json({"done": True}, 0, tag=FILE_TAG)

    try:
        with remote_folders({placed.cached[name].folder: each for name, each in fetched.items()}, loaded):
            yield fetched
    finally:
        with suppress(LinkError):  # the client is gone
            loaded()
        placed.close()
