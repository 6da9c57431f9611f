"""Public data sets and checkpoints of the Hugging Face hub: from its cache, from the network, or a quick answer.

Its libraries try a network that is not there for half a minute. So the first question is whether the hub can be
reached; if not, they are kept to what is on this machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from threading import Thread
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from thinpipe.options import OptionError

PROBE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class PublicData:
    """A data set of the hub."""

    repository: str
    part: str | None = None  # a data set of several has this one as a folder

    @property
    def folder(self) -> str:
        """Where the error's download command puts it."""
        return self.repository.split("/")[1]

    @property
    def download(self) -> str:
        """The command that brings it to this folder."""
        include = f' --include "{self.part}/*"' if self.part else ""
        return f"hf download {self.repository} --repo-type dataset{include} --local-dir {self.folder}"


def load_public(task: str, data: PublicData) -> Any:
    """The data set with all its splits; ValueError within seconds if it cannot be had."""
    datasets = datasets_library()
    try:
        with nullcontext() if reachable() else _kept_offline(datasets):
            return datasets.load_dataset(data.repository, data.part)
    except (OSError, ValueError) as error:  # not in the cache, not to be had; ConnectionError is an OSError
        raise OptionError(
            f"task {task}: the data set {data.repository} {_not_here(error)}. Where there is a network, run\n"
            f"  {data.download}\n"
            f"bring the folder here, and give {{data}} {data.folder}"
        ) from None


def load_checkpoint(task: str, checkpoint: str, load: Callable[..., Any], **options: Any) -> Any:
    """What one of transformers' functions loads from a checkpoint; ValueError within seconds if it cannot be had."""
    try:
        return load(checkpoint, local_files_only=not reachable(), **options)
    except OSError as error:
        folder = checkpoint.split("/")[1]
        raise OptionError(
            f"task {task}: the checkpoint {checkpoint} {_not_here(error)}. Where there is a network, run\n"
            f"  hf download {checkpoint} --local-dir {folder}\n"
            f"bring the folder to every machine that trains, and give {{weights}} {folder}; "
            f"or train from random weights with {{no_pretrained}}"
        ) from None


def _not_here(error: Exception) -> str:
    if reachable():
        return f"could not be downloaded ({error})"
    return f"is not on this machine, and {_host()[0]} cannot be reached"


def datasets_library() -> ModuleType:
    """The library ``datasets``, imported when a task needs it."""
    try:
        return import_module("datasets")
    except ImportError:
        raise ValueError("public data sets are read with the library datasets: pip install 'datasets>=4'") from None


@cache
def reachable() -> bool:
    """Whether the hub, or the proxy on the way to it, answers within seconds; asked once per process."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answers: list[bool] = []
    # In a thread, because looking up a name has no time limit of its own.
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
    way = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or os.environ.get("HF_ENDPOINT")
    parts = urlsplit(way or "https://huggingface.co")
    return parts.hostname or "huggingface.co", parts.port or (80 if parts.scheme == "http" else 443)


@contextmanager
def _kept_offline(datasets: ModuleType) -> Iterator[None]:
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
