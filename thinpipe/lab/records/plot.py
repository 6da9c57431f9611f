"""Plots of records: small multiples of lines, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from thinpipe.lab.records.line_styles import LineStyle, line_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# x and y; with several measurements also the lowest and the highest y.
Series = Mapping[str, Sequence[tuple[float, float] | tuple[float, float, float, float]]]

_PANELS_PER_ROW = 3
_LEGEND_INCHES, _CHARACTER_INCHES = 0.6, 0.085  # width in the legend of a line's sample and of a character


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A panel per entry and a line per series, with common axes unless panels have a range of their own."""

    title: str
    x_label: str
    y_label: str
    panels: Mapping[str, Series]
    x_log: bool = False
    x_ticks: Mapping[float, str] | None = None  # tick labels by position
    y_log: bool = True
    y_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by panel: a zoomed range
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by panel: a reference y and its deviation
    band_label: str = ""

    def draw(self, path: Path) -> None:
        """Write the plot as a PNG."""
        self.figure().savefig(path, dpi=150)

    def figure(self) -> Figure:
        """Return the plot as a figure of matplotlib."""
        from matplotlib.figure import Figure

        columns = min(len(self.panels), _PANELS_PER_ROW)
        rows = -(-len(self.panels) // columns)
        figure = Figure(figsize=(max(6.4, 4.2 * columns), 3.8 * rows + 1.0), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, sharey=not self.y_ranges, squeeze=False).ravel()
        styles = line_styles(name for series in self.panels.values() for name in series)
        for axis, (panel, series) in zip(axes, self.panels.items(), strict=False):
            _draw_panel(axis, panel, series, styles)
            axis.set_xlabel(self.x_label)
            if self.y_log:
                axis.set_yscale("log")
            if panel in self.y_ranges:
                axis.set_ylim(self.y_ranges[panel])
            if panel in self.bands:
                middle, spread = self.bands[panel]
                axis.axhspan(middle - spread, middle + spread, color="#999999", alpha=0.3, linewidth=0, zorder=0)
                axis.axhline(middle, color="#666666", linewidth=1, zorder=1, label=self.band_label)
            if self.x_log:
                axis.set_xscale("log")
            if self.x_ticks is not None:
                axis.set_xticks(list(self.x_ticks), list(self.x_ticks.values()))
                axis.xaxis.minorticks_off()
        for axis in axes[len(self.panels) :]:
            axis.set_visible(False)
        handles = {line.get_label(): line for axis in axes for line in axis.get_lines()}
        longest = max((len(str(name)) for name in handles), default=1)
        fits = int(figure.get_figwidth() / (_LEGEND_INCHES + longest * _CHARACTER_INCHES))
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=max(1, min(9, fits)), frameon=False)
        figure.supylabel(self.y_label, fontsize="medium")
        figure.suptitle(self.title)
        return figure


def _draw_panel(axis: Axes, panel: str, series: Series, styles: Mapping[str, LineStyle]) -> None:
    for name, points in series.items():
        style = styles[name]
        ordered = sorted(points)
        for point in ordered:
            if len(point) == 4:
                axis.vlines(point[0], point[2], point[3], color=style.colour, alpha=0.5, zorder=1)
        axis.plot(
            [point[0] for point in ordered],
            [point[1] for point in ordered],
            label=name,
            color=style.colour,
            marker=style.marker,
            linestyle=style.dashes,
            linewidth=1.6,
            markersize=8 if style.is_open else 5,
            markerfacecolor="white" if style.is_open else style.colour,
            zorder=2 if style.is_open else 3,
        )
    axis.set_title(panel, fontsize="medium")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelbottom=True)
