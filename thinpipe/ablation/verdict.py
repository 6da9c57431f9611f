"""What a training left behind -> its figures, or in one line why there are none."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

from thinpipe.measure.record import Record

_DETAILS = ("links", "workers", "epochs")  # lists in a row that no table shows
_NEEDED = ("metric", "validation_loss", "train_loss")


def figures_of(record: Path) -> dict[str, Any]:
    """The fields of a Result that a record fills; nothing if there is no record with finite figures."""
    try:
        read = Record.read(record)
    except ValueError:
        return {}
    row = read.rows[0] if read.rows else {}
    if not all(isinstance(row.get(name), int | float) and math.isfinite(row[name]) for name in _NEEDED):
        return {}
    metric = next((column for column in read.columns if column.name == "metric"), None)
    if metric is None:
        return {}
    return {
        "figures": {name: value for name, value in row.items() if name not in _DETAILS},
        "metric": metric.heading,
        "metric_format": metric.format,
        "environment": read.environment,
        "thinpipe": read.thinpipe,
    }


def last_error(code: int, output: Path) -> str:
    """The last thing a training said that sounds like its error, or how it ended."""
    if code == 0:
        return "ended without finite figures"
    ending = f"killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    told = [place for place, line in enumerate(lines) if line.startswith("thinpipe: ")]
    if told:  # an error that ends with a colon goes on in the next line
        words = lines[told[-1]].removeprefix("thinpipe: ")
        return " ".join([words, *lines[told[-1] + 1 : told[-1] + 2]]) if words.endswith(":") else words
    return f"{ending}: {lines[-1]}" if lines else ending
