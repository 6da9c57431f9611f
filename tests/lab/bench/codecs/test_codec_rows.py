"""The rows of the codec benchmark say what the codecs did."""

import math

import pytest
import torch

from thinpipe.codecs import codec
from thinpipe.lab.bench.codecs.codec_options import CodecBenchOptions
from thinpipe.lab.bench.codecs.measure import CodecColumns, measure_codecs
from thinpipe.lab.bench.codecs.synthetic import made_cases
from thinpipe.lab.records.record import columns_of


def measure(specs, shapes=((2, 24, 8, 8),), contents=("relu6",), reference="none"):
    settings = CodecBenchOptions(device="cpu", repeat=2, budget=0.01, reference=reference)
    codecs = [codec(spec) for spec in specs]
    return list(measure_codecs(made_cases(shapes, contents), codecs, settings))


def test_one_row_per_tensor_and_codec_with_every_column():
    rows = measure(["none", "sort:8"], shapes=[(2, 24, 8, 8), (6, 7)], contents=["relu6", "laplace"])
    assert len({(row["shape"], row["content"], row["codec"]) for row in rows}) == len(rows) == 8
    names = [column.name for column in columns_of(CodecColumns)]
    assert all(list(row) == names for row in rows)


def test_an_exact_codec_has_no_error_and_a_lossy_one_has():
    none, half, uniform = measure(["none", "fp16", "uniform:4"])
    assert (none["wire_ratio"], none["relative_error"], none["snr_db"]) == (1, 0, None)
    assert half["wire_ratio"] == 0.5
    assert 60 < half["snr_db"] < 80
    assert uniform["wire_bytes"] == codec("uniform:4").wire_bytes((2, 24, 8, 8), torch.float32)
    assert 1e-3 < uniform["relative_error"] < 1e-1


def test_columns_are_consistent():
    (row,) = measure(["sort:8"], reference="all")
    assert row["tensor_bytes"] == 4 * 2 * 24 * 8 * 8
    assert row["bits_per_value"] == pytest.approx(32 * row["wire_ratio"])
    assert row["encode_gb_per_s"] == pytest.approx(row["tensor_bytes"] / row["encode_ms"] / 1e6)
    assert row["encode_copies"] == pytest.approx(row["encode_ms"] / row["copy_ms"])
    assert row["encode_speedup"] == pytest.approx(row["reference_encode_ms"] / row["encode_ms"])
    assert row["snr_db"] == pytest.approx(-10 * math.log10(row["relative_error"]))


def test_zeros_in_the_middle_are_exact_with_zero_alone():
    plain, exact = measure(["kmeans:2", "kmeans:2+zero"], contents=["masked"])
    assert 0.4 < plain["zero_fraction"] == exact["zero_fraction"] < 0.6
    assert exact["zero_error"] == 0 < plain["zero_error"] < 0.1
    assert abs(plain["bias"]) < abs(exact["bias"])  # a mean is where errors are as often up as down


@pytest.mark.parametrize(("reference", "timed"), [("none", 0), ("largest", 1), ("all", 4)])
def test_the_reference_runs_on_the_requested_tensors(reference, timed):
    rows = measure(["fp16", "uniform:8"], [(3, 5), (4, 16)], ["relu6", "laplace"], reference)
    with_reference = [row for row in rows if row["reference_encode_ms"] is not None]
    assert len(with_reference) == timed
    assert all(row["codec"] == "uniform:8" for row in with_reference)  # a cast has no other definition
    if reference == "largest":
        assert (with_reference[0]["shape"], with_reference[0]["content"]) == ("4x16", "relu6")
