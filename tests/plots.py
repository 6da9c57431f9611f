"""The data that a plot shows, read from matplotlib's own objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from matplotlib.figure import Figure

from thinpipe.lab.records.plot import Plot

Lines = dict[str, list[tuple[float, float]]]


def shown(figure: Figure) -> dict[str, Lines]:
    """Return the points of each line by its label, by the title of its panel."""
    return {
        axis.get_title(): {
            str(line.get_label()): list(zip(*map(list, line.get_data()), strict=True)) for line in axis.get_lines()
        }
        for axis in figure.axes
        if axis.get_visible()
    }


def looks(figure: Figure) -> dict[str, tuple[str, str, str]]:
    """Return colour, marker and dashes of each line by its label."""
    lines = [line for axis in figure.axes for line in axis.get_lines()]
    return {str(line.get_label()): (line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}


@contextmanager
def drawn() -> Iterator[list[Figure]]:
    """Collect the figures that are written as files inside."""
    figures: list[Figure] = []

    def draw(self: Plot, path: Path) -> None:
        figures.append(self.figure())
        figures[-1].savefig(path)

    with patch.object(Plot, "draw", draw):
        yield figures
