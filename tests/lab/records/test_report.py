"""Tables keep their figures at every width."""

import io

import pytest
from rich.console import Console

from thinpipe.lab.records.record import Check, Column, Record
from thinpipe.lab.records.report import Table, check_table, markdown, plain_text, show, summary

COLUMNS = [
    Column(name="codec", heading="codec", key=True),
    Column(name="encode_ms", heading="encode\nms", format=".2f", better="lower"),
    Column(name="error", heading="error", format=".1e"),
    Column(name="absent", heading="absent"),
]
ROWS = [{"codec": "sort:6+2", "encode_ms": 12.3456, "error": 0.0}, {"codec": "none", "encode_ms": None, "error": 2e-5}]
TABLE = Table(title="A title", columns=COLUMNS, rows=ROWS, note="A note.")


def printed(table, width, terminal):
    file = io.StringIO()
    show([table], Console(file=file, width=width, force_terminal=terminal, color_system=None))
    return file.getvalue()


def test_plain_text_is_aligned():
    assert plain_text(TABLE).splitlines() == [
        "A title",
        "          encode",
        "codec         ms    error",
        "sort:6+2   12.35        0",
        "none           -  2.0e-05",
        "A note.",
    ]


def test_a_column_that_no_row_has_is_left_out():
    assert "absent" not in plain_text(TABLE)


def test_a_pipe_gets_plain_text():
    assert printed(TABLE, width=20, terminal=False) == plain_text(TABLE) + "\n"


@pytest.mark.parametrize("width", [20, 80, 120])
def test_a_terminal_shows_complete_numbers_within_its_width(width):
    text = printed(TABLE, width, terminal=True)
    assert all(len(line) <= width for line in text.splitlines())
    assert all(cell in text for cell in ("sort:6+2", "12.35", "2.0e-05"))


def test_a_narrow_terminal_gets_blocks_that_repeat_the_key():
    assert printed(TABLE, 80, terminal=True).count("sort:6+2") == 1
    assert printed(TABLE, 20, terminal=True).count("sort:6+2") == 2


def test_long_texts_fold_and_numbers_stay_visible():
    checks = [Check(claim="a claim that is long " * 4, measured=3, limit=2, detail="where it was")]
    text = printed(check_table(checks), 80, terminal=True)
    assert text.count("FAIL") == 1
    assert "≤ 2" in text


def test_verdicts():
    checks = [
        Check(claim="holds", measured=1, limit=2, detail="hidden"),
        Check(claim="broken", measured=3, limit=2, unit=" s", detail="worst here"),
        Check(claim="target", measured=1, limit=2, bound="at least", required=False),
    ]
    lines = plain_text(check_table(checks)).splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["PASS", "FAIL", "MISS"]
    assert "hidden" not in lines[0]
    assert "(worst here)" in lines[1]
    assert lines[1].endswith("3 s  ≤ 2 s")
    assert lines[2].endswith("≥ 2")


def test_a_page_has_result_environment_and_command():
    record = Record(kind="test", config={"command": ["thinpipe", "bench", "a b"]}, columns=COLUMNS, rows=ROWS)
    page = markdown("Codecs", record, [TABLE])
    assert "| codec | encode ms | error |\n| :-- | --: | --: |\n| sort:6+2 | 12.35 | 0 |" in page
    assert f"- torch: {record.environment['torch']}" in page
    assert "thinpipe bench 'a b'" in page
    assert str(record.environment["torch"]) in summary(record)


def test_a_fact_of_several_lines_keeps_them_on_a_page():
    record = Record(kind="test", config={}, columns=(), rows=(), environment={"topology": "GPU0  X\nGPU1  NV2"})
    assert "- topology: \n\n  ```\n  GPU0  X\n  GPU1  NV2\n  ```\n" in markdown("Page", record, [])
