"""The best checkpoint of a run: of the best validation metric, kept in addition to the newest.

DIR/best -> step-00000120    a link; manifests have its step and its metric too (``Progress.best``)
"""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from pathlib import Path

from thinpipe.train.checkpoints.manifest import Progress
from thinpipe.train.tasks.task import METRICS

LINK = "best"
_NAME = re.compile(r"step-\d{8,}")


def improves(progress: Progress) -> bool:
    """Return whether the evaluation just made is better than that of the best checkpoint; NaN and infinity are not."""
    metric, best = progress.metric, progress.best
    if best is None or not math.isfinite(metric):
        return math.isfinite(metric)
    return metric != best[1] and METRICS[progress.metric_name].best(metric, best[1]) == metric


def mark_best(directory: Path, name: str | None) -> None:
    """Let the link point to the checkpoint of this name, or remove it; on file systems without links do nothing.

    Replaced atomically: it points to a complete checkpoint at any time.
    """
    link = directory / LINK
    with suppress(OSError):
        if name is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or os.readlink(link) != name:
            temporary = directory / f".{LINK}.tmp"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(name)
            temporary.replace(link)


def follow_best(path: Path) -> Path:
    """Return the checkpoint that ``DIR/best`` points to; any other path as it is."""
    if path.name == LINK and path.is_symlink() and _NAME.fullmatch(target := os.readlink(path)):
        return path.with_name(target)
    return path
