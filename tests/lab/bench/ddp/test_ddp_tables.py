"""The printed layouts, to the letter."""

from pathlib import Path

import pytest

from tests.lab.bench.ddp.made_record import make_record
from thinpipe.lab.bench.ddp.ddp_tables import (
    WIDE,
    WIDE_DIFF,
    diff_lines,
    heading_lines,
    model_lines,
    plot_speed,
    result_tables,
    row_lines,
)
from thinpipe.lab.records.diff import compare
from thinpipe.lab.records.report import markdown

GOLDEN = Path(__file__).parent / "golden"


def bench_text(record, width):
    lines = list(heading_lines(record))
    models = []
    for row in record.rows:
        if row["model"] not in models:
            lines += [*([""] if models else []), *model_lines(row, width)]
            models.append(row["model"])
        lines += row_lines(row, width)
    return "".join(f"{line}\n" for line in lines)


def diff_text(width):
    diff = compare(make_record(), make_record(factor=1.038, bucket_cap_mb=1.0))
    return "".join(f"{line.plain}\n" for line in diff_lines(diff, width))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bench", bench_text(make_record(), WIDE)),
        ("bench_narrow", bench_text(make_record(compress="uniform:8"), 80)),
        ("diff", diff_text(WIDE_DIFF)),
        ("diff_narrow", diff_text(80)),
    ],
    ids=["bench", "bench_narrow", "diff", "diff_narrow"],
)
def test_layout(name, text):
    assert text == (GOLDEN / f"{name}.txt").read_text()
    if name.endswith("narrow"):
        assert max(map(len, text.splitlines())) <= 80


def test_colours_follow_the_sense_of_better():
    slower = compare(make_record(), make_record(factor=1.1))
    faster = compare(make_record(), make_record(factor=0.9))
    same = compare(make_record(), make_record())

    def styles(diff):
        return {str(span.style) for line in diff_lines(diff, 82) for span in line.spans}

    assert (styles(slower), styles(faster), styles(same)) == ({"red"}, {"green"}, set())


def test_a_page_has_a_table_for_every_model():
    record = make_record()
    page = markdown("Times", record, result_tables(record))
    assert "### resnet50 with batch size 32" in page
    assert "| 16 | 2M/8G | 0.104 |" in page


def test_the_plot_has_a_line_for_ddp_and_a_point_without():
    panels = plot_speed(make_record()).panels
    assert list(panels) == ["resnet50", "mobilenetv2"]
    assert [replicas for replicas, _ in panels["resnet50"]["ddp"]] == [1, 8, 16]
    assert panels["resnet50"]["no ddp"] == [(1, pytest.approx(32 / 0.1005))]  # examples / the median of the iterations
