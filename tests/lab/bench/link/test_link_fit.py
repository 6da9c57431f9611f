"""The line through times of messages, and where a codec stops paying."""

import pytest

from thinpipe.lab.bench.link.link_columns import fit_line, pays_below_mbit_per_s

SIZES = [1_000, 100_000, 10_000_000]


def test_finds_the_line_that_times_lie_on():
    line = fit_line(SIZES, [0.5 + size / 12_000 for size in SIZES])
    assert line.latency_ms == pytest.approx(0.5)
    assert line.bytes_per_ms == pytest.approx(12_000)
    assert line.ms(12_000) == pytest.approx(1.5)


def test_no_message_arrives_before_it_is_sent():
    line = fit_line(SIZES, [0.01, 7, 832])
    assert line.latency_ms == 0
    assert line.bytes_per_ms == pytest.approx(10_000_000 / 832, rel=0.02)


@pytest.mark.parametrize(("sizes", "times"), [([5, 5], [1, 2]), ([1, 2, 3], [3, 2, 1]), ([1, 2], [0, 1])])
def test_no_line_if_time_does_not_grow_with_size(sizes, times):
    assert fit_line(sizes, times) is None


def test_rate_from_which_a_codec_stops_paying():
    assert pays_below_mbit_per_s(8_000_000, 2_000_000, 6.0) == pytest.approx(8_000)
    assert pays_below_mbit_per_s(8_000_000, 8_000_000, 6.0) is None
    assert pays_below_mbit_per_s(8_000_000, 2_000_000, 0.0) is None
