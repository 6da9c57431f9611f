"""Tables and the plot show what the rows hold."""

from thinpipe.lab.bench.codecs.codec_tables import plot_error_against_bits, result_tables
from thinpipe.lab.bench.codecs.measure import CodecColumns
from thinpipe.lab.records.record import columns_of
from thinpipe.lab.records.report import plain_text


def row(shape, content, codec, **figures):
    figures = {"wire_ratio": 0.25, "relative_error": 1e-4, "snr_db": 40.0, "tensor_bytes": 2_000_000} | figures
    figures = {"bits_per_value": 32 * figures["wire_ratio"]} | figures
    return (
        {column.name: None for column in columns_of(CodecColumns)}
        | {"shape": shape, "content": content, "codec": codec}
        | figures
    )


ROWS = [
    row("4x4", "relu6", "sort:6+2", encode_ms=1.0, encode_copies=2.0, encode_speedup=80.0),
    row("4x4", "relu6", "none", wire_ratio=1.0, relative_error=0.0, snr_db=None, encode_ms=0.5),
    row("4x4", "laplace", "sort:6+2", encode_ms=3.0, encode_copies=1.0, encode_speedup=60.0, relative_error=3e-4),
    row("4x4", "laplace", "none", wire_ratio=1.0, relative_error=0.0, snr_db=None, encode_ms=0.5),
    row("9x9", "relu6", "sort:6+2", encode_ms=9.0, tensor_bytes=324),
]


def test_three_tables_per_shape_with_a_row_per_codec():
    tables = result_tables(ROWS)
    assert [table.title for table in tables] == [
        "4x4, 2.0 MB: size and error",
        "4x4, 2.0 MB: bias and zeros",
        "4x4, 2.0 MB: costs, the slowest of 2 contents",
        "9x9, 0.3 kB: size and error",
        "9x9, 0.3 kB: bias and zeros",
        "9x9, 0.3 kB: costs",
    ]
    assert [bool(table.footnote()) for table in tables] == [True] * 3 + [False] * 3
    assert [[shown["codec"] for shown in table.rows] for table in tables[:3]] == [["sort:6+2", "none"]] * 3


def test_only_columns_that_are_shown_are_explained():
    rows = [row("4x4", "relu6", "sort:6+2", encode_ms=1.0, encode_copies=2.0)]
    errors, zeros, costs = (table.footnote() for table in result_tables(rows))
    assert "error: squared error" in errors
    assert zeros == "bits: sent per value, header included."
    assert costs == "copies: multiples of the time of a plain copy of the tensor."
    _, zeros, costs = (table.footnote() for table in result_tables([{**rows[0], "bias": 1.0, "encode_speedup": 9.0}]))
    assert "bias: mean error" in zeros
    assert "zeros:" not in zeros
    assert "times faster: than" in costs
    on_a_gpu = [{**rows[0], "encode_floors": 2.0}]
    assert [word in result_tables(on_a_gpu, "cuda")[2].footnote() for word in ("floors:", "launch:")] == [True, False]


def test_errors_stand_under_their_content():
    lines = plain_text(result_tables(ROWS)[0]).splitlines()
    assert lines[1].split() == ["relu6", "SNR", "laplace", "SNR"]
    assert lines[2].split() == ["codec", "wire", "bits", "error", "dB", "error", "dB"]
    assert lines[3].split() == ["sort:6+2", "0.250", "8.00", "1.0e-04", "40.0", "3.0e-04", "35.2"]


def test_bias_and_zeros_stand_under_their_content():
    rows = [
        row("4x4", "relu6", "uniform:4", bias=-12.34, zero_error=0.0, zero_fraction=0.501),
        row("4x4", "laplace", "uniform:4", bias=0.5, zero_fraction=0.0),
    ]
    lines = plain_text(result_tables(rows)[1]).splitlines()
    assert lines[1].split() == ["relu6", "zeros", "laplace"]
    assert lines[2].split() == ["codec", "bits", "bias", "50.1%", "bias"]
    assert lines[3].split() == ["uniform:4", "8.00", "-12.3", "0", "+0.5"]


def test_by_bits_what_sends_the_same_stands_together():
    rows = [
        row(shape, "relu6", codec, wire_ratio=ratio)
        for shape in ("9x9", "4x4")
        for codec, ratio in (("sort:8", 0.25), ("kmeans:4", 0.13), ("uniform:8", 0.25), ("sort:4", 0.125))
    ]
    tables = result_tables(rows, by_bits=True)
    assert [shown["codec"] for shown in tables[0].rows] == ["sort:4", "kmeans:4", "sort:8", "uniform:8"]
    assert [table.title[:3] for table in tables] == ["9x9"] * 3 + ["4x4"] * 3


def test_more_than_three_contents_become_more_tables_rather_than_wider_ones():
    tables = result_tables([row("4x4", f"layer{i}", "none") for i in range(7)])
    assert [table.title.partition(": ")[2].split()[0] for table in tables] == ["size", "bias"] * 3 + ["costs,"]
    assert [sum("error" in column.name for column in table.columns) for table in tables[::2]] == [3, 3, 1, 0]


def test_costs_are_those_of_the_worst_content():
    shown = result_tables(ROWS)[2].rows[0]
    assert (shown["encode_ms"], shown["encode_copies"], shown["encode_speedup"]) == (3.0, 2.0, 60.0)


def test_every_table_fits_eighty_columns():
    wide = [
        row(
            "32x32x112x112",
            content,
            "sort:12+4+zero",
            bias=-12345.6,
            zero_error=1e-3,
            zero_fraction=0.123456,
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
    more = [row("4x4", "relu6", spec, wire_ratio=0.125) for spec in ("sort:3+1", "sort:3+1+zero")]
    panels = plot_error_against_bits([*ROWS, *more]).panels
    assert panels == {
        "relu6": {"sort": [(8.0, 1e-4), (4.0, 1e-4)], "sort+zero": [(4.0, 1e-4)]},
        "laplace": {"sort": [(8.0, 3e-4)]},
    }
