"""The log of a server: who has connected, what was run, how it ended; one line each, never anything of the data."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime

from thinpipe.comm.secure.identity import home
from thinpipe.system.sanitize import one_line

_FILE = "serve.log"
_LARGEST = 10 << 20  # bytes; then it begins anew, and the earlier lines stay in serve.log.1


def append_log(line: str) -> None:
    """Append a line with the time in UTC; a full disk does not end a server."""
    path = home() / _FILE
    with suppress(OSError):
        if path.exists() and path.stat().st_size > _LARGEST:
            path.replace(path.with_suffix(".log.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {one_line(line)}\n")
