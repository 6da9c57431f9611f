"""Execution of a function on all replicas, started here or by torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import typer

from thinpipe.comm.errors import WorkerError
from thinpipe.comm.membership import member
from thinpipe.lab.netem.network import Network

Result = TypeVar("Result")


def check_workers(given: int | None, device: str) -> int | None:
    """Return the number of replicas to start here; None if torchrun has started them."""
    me = member()
    if me is not None:
        if given not in (None, me.size):
            raise ValueError(f"torchrun has started {me.size} replicas: leave out --workers {given}")
        return None
    return given or (torch.cuda.device_count() if device == "cuda" else 2)


def run_replicas(
    function: Callable[..., Result | None], *args: object, workers: int | None, network: Network | None = None
) -> Result | None:
    """Call ``function(*args)`` on all replicas and return the first one's result; None in other processes.

    A replica that fails ends the others and the command: exit code 1, with its name and its error.
    """
    from thinpipe.launch.workers import run_workers

    with worker_errors():
        return run_workers(function, *args, workers=workers, network=network)[0]


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turn a WorkerError into its message and exit code, without a traceback of the launcher."""
    try:
        yield
    except WorkerError as error:
        typer.echo(f"thinpipe: {error}", err=True)
        raise typer.Exit(error.code) from None
