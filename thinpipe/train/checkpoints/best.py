"""The checkpoint with the best validation metric of a run, kept in addition to the newest.

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
    """Return True if the last evaluation is better than the best checkpoint's; NaN and infinity never are."""
    metric, best = progress.metric, progress.best
    if best is None or not math.isfinite(metric):
        return math.isfinite(metric)
    return metric != best[1] and METRICS[progress.metric_name].best(metric, best[1]) == metric


def mark_best(directory: Path, name: str | None) -> None:
    """Point the link to the checkpoint of this name, or remove it; do nothing on file systems without links.

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
