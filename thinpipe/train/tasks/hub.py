"""Public data sets and checkpoints of the Hugging Face hub: from its cache or the network, or an error within seconds.

The hub's libraries retry an unreachable network for half a minute. So reachability is checked first; if the hub cannot
be reached, they are set to offline mode.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from thinpipe.comm.membership import member
from thinpipe.options import OptionError
from thinpipe.system.files import check_folder, check_regular, errors_named
from thinpipe.system.sanitize import first_line

PROBE_S = 3.0
_DESCRIBING = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")  # config, tokenizer, index of the weights


@dataclass(frozen=True, kw_only=True)
class PublicData:
    """A data set of the hub."""

    repository: str
    part: str | None = None  # folder of one data set, in a repository of several

    @property
    def folder(self) -> str:
        """The folder that the download command in errors creates."""
        return self.repository.split("/")[1]

    @property
    def download(self) -> str:
        """The command that downloads it to this folder."""
        include = f' --include "{self.part}/*"' if self.part else ""
        return f"hf download {self.repository} --repo-type dataset{include} --local-dir {self.folder}"


def load_public(task: str, data: PublicData) -> Any:
    """Return the data set with all its splits; raise OptionError within seconds if it is not available."""
    datasets = datasets_library()
    try:
        with nullcontext() if reachable() else _kept_offline(datasets):
            return datasets.load_dataset(data.repository, data.part)
    except (OSError, ValueError) as error:  # not cached, not available; ConnectionError is an OSError
        raise OptionError(
            f"task {task}: the data set {data.repository} {_not_here(error)}. Where there is a network, run\n"
            f"  {data.download}\n"
            f"bring the folder here, and give {{data}} {data.folder}"
        ) from None


@cache
def fetch_model(name: str, option: str, *, weights: bool, code: bool, task: str | None = None) -> Path:
    """Return the folder of a repository's files in the hub's cache; raise OptionError within seconds if not available.

    ``weights``: include its safetensors files; ``code``: include programs that come with it; ``task``: the task whose
    default the repository is, which may also have pickled weights.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if member() is not None:
        disable_progress_bars()  # every worker would show them
    patterns = [*_DESCRIBING, *(["*.safetensors"] if weights else []), *(["*.py"] if code else [])]
    # Subfolders of the repository are for other programs.
    download = partial(snapshot_download, name, ignore_patterns=["*/*"], local_files_only=not reachable())
    try:
        folder = Path(download(allow_patterns=patterns))
        if task is not None and not any(folder.glob("*.safetensors")):
            folder = Path(download(allow_patterns=[*patterns, "pytorch_model.bin"]))
    except (OSError, ValueError) as error:  # not cached, not available, or no name of the hub
        raise OptionError(_missing_model(name, option, task, _not_here(error))) from None
    return folder


def _missing_model(name: str, option: str, task: str | None, reason: str) -> str:
    folder = name.split("/")[-1]
    if task is not None:
        return (
            f"task {task}: the checkpoint {name} {reason}. Where there is a network, run\n"
            f"  hf download {name} --local-dir {folder}\n"
            f"bring the folder to every machine that trains, and give {{{option}}} {folder}; "
            f"or train from random weights with {{no_pretrained}}"
        )
    nor = " and no model type of transformers" if option == "config" else ""
    return (
        f"{{{option}}} {name} is no folder here{nor}, and as a name of the hub it {reason}; where there "
        f"is a network, run `hf download {name} --local-dir {folder}`, bring the folder to every machine, and give "
        f"{{{option}}} {folder}"
    )


def _not_here(error: Exception) -> str:
    if reachable():
        return f"could not be downloaded ({first_line(error)})"
    return f"is not on this machine, and {_host()[0]} cannot be reached"


def datasets_library() -> ModuleType:
    """Import and return the library ``datasets``, only when a task needs it."""
    try:
        return import_module("datasets")
    except ImportError:
        raise ValueError("public data sets are read with the library datasets: pip install 'datasets>=4'") from None


@cache
def reachable() -> bool:
    """Return True if the hub, or the proxy to it, answers within seconds; checked one time per process."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answers: list[bool] = []
    # In a thread, because a name lookup has no timeout of its own.
    probe = Thread(target=lambda: answers.append(_answers(*_host())), daemon=True)
    probe.start()
    probe.join(PROBE_S)
    return any(answers)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


def _host() -> tuple[str, int]:
    names = ("HTTPS_PROXY", "https_proxy", "HF_ENDPOINT")
    parts = urlsplit(next(filter(None, map(os.environ.get, names)), "https://huggingface.co"))
    return parts.hostname or "huggingface.co", parts.port or (80 if parts.scheme == "http" else 443)


@contextmanager
def _kept_offline(datasets: ModuleType) -> Iterator[None]:
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


MOST_CLASSES = 100_000  # a classifier for more is a mistake: ids or times instead of labels


def load_saved(path: Path, splits: tuple[str, ...], part: str | None = None) -> dict[str, Any]:
    """Return these splits of a folder that ``save_to_disk`` wrote, or of parquet files as on the hub."""
    if not path.is_dir():
        raise OptionError(f"{{data}} is a folder with a data set, and {path} is none")
    found = _saved_by_datasets(path) if (path / "dataset_dict.json").is_file() else _parquet(path, splits, part)
    missing = [split for split in splits if split not in found]
    if missing:
        raise OptionError(
            f"{{data}} {path} needs the splits {', '.join(splits)}; it has {', '.join(found) or 'none'}. It should be "
            "a folder of datasets' save_to_disk, or of parquet files named SPLIT-*.parquet as on the hub"
        )
    return {split: found[split] for split in splits}


def public_splits(
    task: str, data: PublicData, path: Path | None, splits: tuple[str, ...], columns: tuple[str, ...]
) -> list[Any]:
    """Return the rows of these splits, which stay on disk; raise ValueError if one lacks a column."""
    found = load_public(task, data) if path is None else load_saved(path, splits, data.part)
    for rows in (found[split] for split in splits):
        if not set(columns) <= set(rows.column_names):
            raise ValueError(
                f"{path or data.repository} should have the columns {', '.join(columns)}, as {data.repository} has; "
                f"it has {', '.join(rows.column_names)}"
            )
    return [found[split] for split in splits]


def class_numbers(where: Path | str, column: str, values: Sequence[Any]) -> Tensor:
    """Return a column of labels as a tensor; raise ValueError that names the row if one is not a class number."""
    for number, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_CLASSES:
            raise ValueError(
                f"{where}: {column} holds numbers of classes, 0 to {MOST_CLASSES - 1}; row {number} has {value!r}. "
                f"Remove the row, or number the classes from 0"
            )
    return torch.tensor(values)


def class_names(rows: Any, column: str) -> tuple[str, ...]:
    """Return the names of a column's classes, by number; empty if the data set has none."""
    return tuple(getattr(rows.features[column], "names", None) or ())


def _saved_by_datasets(path: Path) -> dict[str, Any]:
    datasets = datasets_library()
    for folder in (path, *(each for each in path.iterdir() if each.is_dir())):
        check_folder(folder, "a data set that save_to_disk wrote")
    with errors_named(path, "a data set that save_to_disk wrote", "bring the complete folder, or name another"):
        return dict(datasets.load_from_disk(str(path)))


def _parquet(path: Path, splits: tuple[str, ...], part: str | None) -> dict[str, Any]:
    # Several data sets may share a repository, each in its own folder: glue/rte, glue/cola.
    root = path / part if part and (path / part).is_dir() else path
    files = {
        split: sorted(str(file) for file in root.rglob("*.parquet") if file.stem.split("-")[0] == split)
        for split in splits
    }
    files = {split: each for split, each in files.items() if each}
    if not files:
        return {}
    datasets = datasets_library()
    for file in (Path(name) for each in files.values() for name in each):
        _check_parquet(file)
    with errors_named(root, "parquet files", "bring them anew, or name another folder"):
        return dict(datasets.load_dataset("parquet", data_files=files))


def _check_parquet(file: Path) -> None:
    """Raise ValueError if a file's start or end is not parquet's: ``datasets`` would not name the file."""
    from pyarrow.parquet import read_metadata  # type: ignore[import-untyped]

    check_regular(file, "parquet")
    with errors_named(file, "parquet", "bring it anew"):
        read_metadata(file)
