"""Files beside a run: a disk that does not take one is told in a line, and does not end the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinpipe.measure.atomic import written_whole
from thinpipe.options import named


@contextmanager
def written_beside(option: str, path: Path) -> Iterator[Path]:
    """Where to write what is to be at ``path``, whole or not at all; ``option`` asked for it, as in {trace}."""
    from safetensors import SafetensorError  # its word for a full disk

    try:
        with written_whole(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        line = str(error).partition("\n")[0]
        print(f"thinpipe: {named(option)} {path} is not written, the run goes on: {line}", file=sys.stderr, flush=True)
