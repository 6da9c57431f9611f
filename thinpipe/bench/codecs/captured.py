"""Rows of captured tensors: forty of one link say together what one of them says by chance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

from thinpipe.bench.codecs.figures import Losses, decibels
from thinpipe.measure.figures import columns_of
from thinpipe.measure.record import Row

MEANS_NOTE = "Captured tensors: the mean over steps and chunks of a direction and link."

_NAME = re.compile(r"(forward|backward)/(\d+-\d+)/.+")  # then tensor, step and chunk


def mean_over_steps(rows: Sequence[Row]) -> list[Row]:
    """One row for all tensors of a direction, link, shape and codec; what is named otherwise stays as it is."""
    together: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        captured = _NAME.fullmatch(row["content"])
        content = "/".join(captured.groups()) if captured else row["content"]
        together.setdefault((row["shape"], content, row["codec"]), []).append(row)
    return [{**same[0], "content": content, **_means(same)} for (_, content, _), same in together.items()]


def _means(rows: Sequence[Row]) -> Row:
    means: dict[str, float | None] = {}
    for column in columns_of(Losses):
        figures = [row[column.name] for row in rows if row[column.name] is not None]
        means[column.name] = fmean(figures) if figures else None
    return {**means, "snr_db": decibels(means["relative_error"])}
