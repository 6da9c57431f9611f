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


def test_each_shape_has_a_table_per_content_and_one_of_costs():
    tables = result_tables(ROWS)
    assert [table.title for table in tables] == [
        "4x4, 2.0 MB, relu6: size and error",
        "4x4, 2.0 MB, laplace: size and error",
        "4x4, 2.0 MB: costs, the slowest of 2 contents",
        "9x9, 0.3 kB, relu6: size and error",
        "9x9, 0.3 kB: costs",
    ]
    assert [bool(table.footnote()) for table in tables] == [True, False, True, False, False]
    assert [[shown["codec"] for shown in table.rows] for table in tables[:3]] == [["sort:6+2", "none"]] * 3


def test_only_columns_that_are_shown_are_explained():
    rows = [row("4x4", "relu6", "sort:6+2", encode_ms=1.0, encode_copies=2.0)]
    errors, costs = (table.footnote() for table in result_tables(rows))
    assert "error: squared error" in errors
    assert "bias:" not in errors
    assert costs == "copies: multiples of the time of a plain copy of the tensor."
    errors, costs = (table.footnote() for table in result_tables([{**rows[0], "bias": 1.0, "encode_speedup": 9.0}]))
    assert "bias: mean error" in errors
    assert "zeros:" not in errors
    assert "times faster: than" in costs
    on_a_gpu = [{**rows[0], "encode_floors": 2.0}]
    assert [word in result_tables(on_a_gpu, "cuda")[1].footnote() for word in ("floors:", "launch:")] == [True, False]


def test_the_table_of_a_content_has_its_errors_and_zeros():
    rows = [
        row("4x4", "relu6", "uniform:4", bias=-12.34, zero_error=0.0, zero_fraction=0.501),
        row("4x4", "laplace", "uniform:4", bias=0.5, zero_fraction=0.0, relative_error=3e-4, snr_db=35.2),
    ]
    relu6, laplace, _ = (plain_text(table).splitlines() for table in result_tables(rows))
    assert relu6[0] == "4x4, 2.0 MB, relu6, 50.1% zeros: size and error"
    assert relu6[2].split() == ["codec", "wire", "bits", "error", "dB", "bias", "zeros"]
    assert relu6[3].split() == ["uniform:4", "0.250", "8.00", "1.0e-04", "40.0", "-12.3", "0"]
    assert laplace[3].split() == ["uniform:4", "0.250", "8.00", "3.0e-04", "35.2", "+0.5"]


def test_by_bits_sorts_rows_by_size():
    rows = [
        row(shape, "relu6", codec, wire_ratio=ratio)
        for shape in ("9x9", "4x4")
        for codec, ratio in (("sort:8", 0.25), ("kmeans:4", 0.13), ("uniform:8", 0.25), ("sort:4", 0.125))
    ]
    tables = result_tables(rows, by_bits=True)
    assert [shown["codec"] for shown in tables[0].rows] == ["sort:4", "kmeans:4", "sort:8", "uniform:8"]
    assert [table.title[:3] for table in tables] == ["9x9"] * 2 + ["4x4"] * 2


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
