"""Output files at the end of a command: written atomically; a record that cannot be written goes to stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from thinpipe.lab.records.record import Record
from thinpipe.system.files import OutputError, replace_file


def write_or_print(record: Record, path: Path) -> None:
    """Write the record and report it on stderr; if that fails, print it on stdout and raise OutputError."""
    try:
        write_output(path, lambda temporary: temporary.write_text(record.to_json()))
    except OutputError as error:
        print(record.to_json(), flush=True)
        raise OutputError(f"{error}; the record is on stdout instead") from None


def write_output(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path, move the file to ``path``, and report it on stderr."""
    try:
        with replace_file(path) as temporary:
            write(temporary)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
    print(f"wrote {path}", file=sys.stderr)
