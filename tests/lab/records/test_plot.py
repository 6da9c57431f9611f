"""A plot has the given data, and becomes a PNG even without any."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import same_color

from tests.plots import looks, shown
from thinpipe.lab.records.line_styles import line_styles
from thinpipe.lab.records.plot import Plot, Series

PANELS: dict[str, Series] = {
    "one": {"tile": [(2, 0.01), (1, 0.1)], "sort:8": [(1, 0.2)]},
    "two": {"tile": [(4, 0.5, 0.4, 0.6)]},
}


def plot(**changed: object) -> Plot:
    return Plot(**{"title": "t", "x_label": "x", "y_label": "y", "panels": PANELS} | changed)  # type: ignore[arg-type]


def test_every_panel_has_its_lines_in_the_order_of_x() -> None:
    figure = plot().figure()
    assert shown(figure) == {"one": {"tile": [(1, 0.1), (2, 0.01)], "sort:8": [(1, 0.2)]}, "two": {"tile": [(4, 0.5)]}}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["tile", "sort:8"]
    assert {axis.get_xlabel() for axis in figure.axes} == {"x"}
    assert (figure.get_suptitle(), figure.get_supylabel()) == ("t", "y")


def test_lines_have_their_styles() -> None:
    styles = line_styles(["tile", "sort:8"])
    expected = {name: (style.colour, style.marker, style.dashes) for name, style in styles.items()}
    assert looks(plot().figure()) == expected


def test_a_range_of_seeds_is_a_bar_in_the_colour_of_its_line() -> None:
    axis = plot().figure().axes[1]
    (bar,) = axis.collections
    assert bar.get_paths()[0].vertices.tolist() == [[4, 0.4], [4, 0.6]]
    assert same_color(bar.get_edgecolor()[0][:3], line_styles(["tile"])["tile"].colour)


def test_axes_ticks_ranges_and_bands() -> None:
    chosen = {"x_log": True, "x_ticks": {1.0: "slow", 4.0: "fast"}, "y_log": False, "y_ranges": {"two": (0.0, 2.0)}}
    one, two = plot(**chosen, bands={"two": (1.0, 0.25)}, band_label="none ± std").figure().axes
    assert [text.get_text() for text in one.get_xticklabels()] == ["slow", "fast"]
    assert (one.get_xscale(), one.get_yscale(), two.get_ylim()) == ("log", "linear", (0.0, 2.0))
    middle = next(line for line in two.get_lines() if line.get_label() == "none ± std")
    assert list(middle.get_ydata()) == [1.0, 1.0]
    (band,) = two.patches
    assert (band.get_y(), band.get_height()) == (0.75, 0.5)


@pytest.mark.parametrize(
    "panels", [{str(i): {"a": [(1, 0.1)]} for i in range(5)}, {"empty": {}}], ids=["two rows", "none"]
)
def test_as_many_panels_as_there_are(panels: dict[str, Series], tmp_path: Path) -> None:
    one = plot(panels=panels)
    assert list(shown(one.figure())) == list(panels)
    one.draw(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
