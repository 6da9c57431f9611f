"""Rows, tables and the plot of the data-parallel benchmark."""

from pathlib import Path

import pytest

from tests.lab.bench.ddp.made_record import make_record
from tests.plots import shown
from thinpipe.lab.bench.ddp.ddp_tables import plot_speed, result_tables, row_line
from thinpipe.lab.records.report import markdown, plain_text

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(("name", "compress"), [("bench", None), ("bench_compressed", "uniform:8")])
def test_layout(name, compress):
    record = make_record(compress=compress)
    text = "\n".join([*map(row_line, record.rows), "", *map(plain_text, result_tables(record))])
    assert text == (GOLDEN / f"{name}.txt").read_text()


def test_a_page_has_a_table_for_every_model():
    record = make_record()
    page = markdown("Times", record, result_tables(record))
    assert "### resnet50 with batch size 32" in page
    assert "| 16 | 2M/8G | 0.1035 |" in page


def test_the_plot_has_a_line_for_ddp_and_a_point_without():
    panels = shown(plot_speed(make_record()).figure())
    assert list(panels) == ["resnet50", "mobilenetv2"]
    assert [replicas for replicas, _ in panels["resnet50"]["ddp"]] == [1, 8, 16]
    assert panels["resnet50"]["no ddp"] == [(1, pytest.approx(32 / 0.1005))]  # examples / the median of the iterations
