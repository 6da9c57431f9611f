"""Errors of workers that a command started, as one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from thinpipe.comm.errors import WorkerError


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turn a WorkerError into its message and exit code, without a traceback of the launcher."""
    try:
        yield
    except WorkerError as error:
        typer.echo(f"thinpipe: {error}", err=True)
        raise typer.Exit(error.code) from None
