"""Comparison of files that every worker reads locally: by content, since paths differ between machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinpipe.options import named
from thinpipe.train.engines.world import SetupError, World
from thinpipe.train.models.remote import remote_folder


def check_same_files(
    given: Mapping[str, str | None], identify: Callable[[str], Mapping[str, str]], world: World
) -> None:
    """Raise SetupError on all workers unless options name files of the same content everywhere. A collective.

    ``given`` maps options to the values this worker was started with; ``identify`` returns a hash of each part of an
    option's files, or raises ValueError.
    """
    if world.workers == 1:
        return
    everyone = world.gather({name: _look_up(name, value, identify) for name, value in given.items()})
    for name in given:
        client = everyone[0][name]
        if client["problem"] is not None:
            raise SetupError(client["problem"])
        for worker, theirs in enumerate(everyone[1:], start=1):
            problem = _difference(name, client, worker, theirs[name])
            if problem is not None:
                raise SetupError(named(problem))


def _look_up(name: str, value: str | None, identify: Callable[[str], Mapping[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {"given": value, "parts": {}, "problem": None, "from_client": False}
    if value is not None and remote_folder(Path(value)) is not None:
        found["from_client"] = True  # compared when tensors are fetched, by content
    elif value is not None:
        found["is_folder"] = Path(value).is_dir()
        try:
            found["parts"] = dict(identify(name))
        except ValueError as error:
            found["problem"] = str(error)
    return found


def _difference(name: str, client: dict[str, Any], worker: int, theirs: dict[str, Any]) -> str | None:
    if theirs["from_client"]:
        return None
    if (client["given"] is None) != (theirs["given"] is None):
        who = "the client" if client["given"] is None else f"worker {worker}"
        return f"all workers are started with the same options, and {who} was started without {{{name}}}: give it there"
    if client["given"] is not None and client["is_folder"] and not theirs["is_folder"]:
        folder = theirs["given"]
        return f"worker {worker} has no folder {folder}: bring the client's, and name it there with {{{name}}}"
    if theirs["problem"] is not None:
        return f"worker {worker}: {theirs['problem']}"
    parts = client["parts"].keys() | theirs["parts"].keys()
    other = sorted(part for part in parts if client["parts"].get(part) != theirs["parts"].get(part))
    if other:
        return (
            f"{{{name}}} names another model on worker {worker} ({theirs['given']}) than on the client: "
            f"{' and '.join(other)} differ; bring the client's folder to that machine"
        )
    return None
