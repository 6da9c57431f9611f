"""Plots become PNG files, however little there is to draw."""

import pytest

from thinpipe.measure.plot import Plot


@pytest.mark.parametrize(
    "panels",
    [
        {"one": {"a": [(1, 0.1), (2, 0.01)], "b": [(1, 0.2)]}},
        {str(i): {"a": [(1, 0.1)]} for i in range(5)},
        {"empty": {}},
    ],
    ids=["lines", "two-rows", "nothing"],
)
def test_draws_a_png(panels, tmp_path):
    Plot(title="t", x_label="x", y_label="y", panels=panels).draw(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
