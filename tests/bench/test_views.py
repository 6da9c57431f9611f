"""Tables and the plot show what the rows hold."""

from thinpipe.bench.codecs import COLUMNS
from thinpipe.bench.views import plot_error_against_bits, result_tables
from thinpipe.measure.report import plain_text


def row(shape, content, codec, **figures):
    figures = {"wire_ratio": 0.25, "relative_error": 1e-4, "snr_db": 40.0, "tensor_bytes": 2_000_000} | figures
    return {column.name: None for column in COLUMNS} | {"shape": shape, "content": content, "codec": codec} | figures


ROWS = [
    row("4x4", "relu6", "sort:6+2", encode_ms=1.0, encode_copies=2.0, encode_speedup=80.0),
    row("4x4", "relu6", "none", wire_ratio=1.0, relative_error=0.0, snr_db=None, encode_ms=0.5),
    row("4x4", "laplace", "sort:6+2", encode_ms=3.0, encode_copies=1.0, encode_speedup=60.0, relative_error=3e-4),
    row("4x4", "laplace", "none", wire_ratio=1.0, relative_error=0.0, snr_db=None, encode_ms=0.5),
    row("9x9", "relu6", "sort:6+2", encode_ms=9.0, tensor_bytes=324),
]


def test_two_tables_per_shape_with_a_row_per_codec():
    tables = result_tables(ROWS)
    assert [table.title for table in tables] == [
        "4x4, 2.0 MB: what travels and what is lost",
        "4x4, 2.0 MB: what it costs, the slowest of 2 contents",
        "9x9, 0.3 kB: what travels and what is lost",
        "9x9, 0.3 kB: what it costs",
    ]
    assert [bool(table.note) for table in tables] == [True, True, False, False]
    assert [[shown["codec"] for shown in table.rows] for table in tables[:2]] == [["sort:6+2", "none"]] * 2


def test_errors_stand_under_their_content():
    lines = plain_text(result_tables(ROWS)[0]).splitlines()
    assert lines[1].split() == ["relu6", "SNR", "laplace", "SNR"]
    assert lines[2].split() == ["codec", "wire", "error", "dB", "error", "dB"]
    assert lines[3].split() == ["sort:6+2", "0.250", "1.0e-04", "40.0", "3.0e-04", "40.0"]


def test_costs_are_those_of_the_worst_content():
    shown = result_tables(ROWS)[1].rows[0]
    assert (shown["encode_ms"], shown["encode_copies"], shown["encode_speedup"]) == (3.0, 2.0, 60.0)


def test_every_table_fits_eighty_columns():
    wide = [
        row(
            "32x32x112x112",
            content,
            "sort:12+4",
            encode_ms=1234.56,
            decode_ms=123.45,
            encode_gb_per_s=12.34,
            decode_gb_per_s=12.34,
            encode_copies=123.4,
            decode_copies=12.3,
            encode_speedup=123.0,
            encode_extra_ratio=0.123,
        )
        for content in ("relu6", "outliers", "laplace")
    ]
    for table in result_tables(wide):
        assert max(map(len, plain_text(table).splitlines())) <= 80


def test_the_plot_has_a_panel_per_content_and_a_line_per_family_of_the_first_shape():
    panels = plot_error_against_bits([*ROWS, row("4x4", "relu6", "sort:3+1", wire_ratio=0.125)]).panels
    assert panels == {
        "relu6": {"sort": [(8.0, 1e-4), (4.0, 1e-4)]},
        "laplace": {"sort": [(8.0, 3e-4)]},
    }
