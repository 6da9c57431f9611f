"""Rows of the link benchmark: what stamps of both ends become, and what a user may ask for."""

import pytest

from thinpipe.lab.bench.link.link_columns import LinkColumns, make_row, with_lines
from thinpipe.lab.bench.link.link_options import LinkBenchOptions, parse_sizes
from thinpipe.lab.bench.link.link_tables import plot_times, rate_text, result_tables, row_line
from thinpipe.lab.bench.link.probe import Probed, check_probed
from thinpipe.lab.records.record import columns_of
from thinpipe.lab.records.report import plain_text
from thinpipe.links.counters import Counters, LinkEnd, Stamp
from thinpipe.train.shaping import parse_link, shaping_of

WIRE = 1_000_000
PROBED = Probed(round_trip_ms=150.0, packets=10, loss_down=0.1, loss_up=0.0, down_mbit_per_s=99.0, up_mbit_per_s=9.0)


def ends(late_s, transfer_s=0.1, wire=WIRE, encode_ms=0.0):
    """Both ends of three messages: the receiver wants each at second 1, the sender is so late."""
    counters = Counters(messages=3, encode_ms=3 * encode_ms, decode_ms=3 * encode_ms)
    sent = [Stamp(step, 0, 0, 1 + late_s, 1 + late_s) for step in range(3)]
    received = [Stamp(step, 0, 0, 1.0, 1 + late_s + transfer_s, wire_bytes=wire) for step in range(3)]
    return [LinkEnd(True, 0, 1, counters, tuple(sent), 0), LinkEnd(False, 0, 1, counters, tuple(received), 1)]


def row(late_s=0.0, size=WIRE, codec="none", **options):
    return make_row(shaping_of(100.0), "gloo", codec, "one way", size, ends(late_s, **options), PROBED)


def test_a_late_sender_changes_recv_time_and_not_the_transfer():
    on_time, late = row(0.0), row(0.4)
    assert on_time["recv_gb_per_s"] == pytest.approx(on_time["gb_per_s"])
    assert late["gb_per_s"] == pytest.approx(on_time["gb_per_s"])
    assert late["recv_gb_per_s"] == pytest.approx(on_time["recv_gb_per_s"] / 5)  # 0.1 s of the 0.5 it waited
    assert late["late_ms"] == pytest.approx(400)


def test_effective_bandwidth_counts_the_codec():
    coded = row(size=4 * WIRE, codec="uniform:8", encode_ms=50.0)
    assert coded["gb_per_s"] == pytest.approx(WIRE / 0.1 / 1e9)
    assert coded["effective_gb_per_s"] == pytest.approx(4 * WIRE / 0.2 / 1e9)
    assert coded["pays_below_mbit_per_s"] == pytest.approx(3 * WIRE * 8 / 0.1 / 1e6)


def test_links_are_compared_with_the_requested_ones():
    good = {"down_mbit_per_s": 95.0, "up_mbit_per_s": 19.4, "round_trip_ms": 41.0, "packets": 10_000}
    good |= {"loss_down": 0.0011, "loss_up": 0.0005}
    link = parse_link("100mbit/20mbit,20ms,0.1%")
    checks = {check.claim.partition(": ")[2]: check for check in check_probed(link, good)}
    assert all(check.passed for check in checks.values())
    assert checks["rate down"].measured == pytest.approx(0.05)
    assert checks["round trip"].measured == pytest.approx(1.0, abs=0.1)  # less the time of the packets themselves
    assert checks["loss up, in standard errors"].measured == pytest.approx(1.58, abs=0.01)
    for name, value, claim in (
        ("up_mbit_per_s", 18.0, "rate up"),
        ("round_trip_ms", 42.5, "round trip"),
        ("round_trip_ms", 37.5, "round trip"),
        ("loss_down", 0.002, "loss down, in standard errors"),
    ):
        failed = [check.claim for check in check_probed(link, good | {name: value}) if not check.passed]
        assert failed == [f"{link.text}: {claim}"]
    unknown = dict.fromkeys(("round_trip_ms", "packets", "loss_down", "loss_up"))
    assert sum(not check.passed for check in check_probed(link, good | unknown)) == 3
    jittery = parse_link("100mbit/20mbit,20-30ms,0.1%")
    assert all(check.passed for check in check_probed(jittery, good | {"round_trip_ms": 55.0}))


def test_lines_and_gains():
    rows = with_lines(
        [
            row(size=WIRE, transfer_s=0.1),
            row(size=2 * WIRE, wire=2 * WIRE, transfer_s=0.2),
            row(size=2 * WIRE, codec="fp16", transfer_s=0.1, encode_ms=25.0),
        ]
    )
    assert rows[0]["bandwidth_mbit_per_s"] == pytest.approx(80)
    assert rows[0]["of_nominal"] == pytest.approx(0.8)
    assert rows[1]["residual"] == pytest.approx(0, abs=1e-9)
    assert [each["chunks_to_hide"] for each in rows] == [3, 2, None]  # 100 and 200 ms each, 150 for the answer
    assert rows[2]["of_uncompressed"] == pytest.approx(0.2 / 0.15)
    assert rows[2]["line_ms"] is None  # one size makes no line
    names = {column.name for column in columns_of(LinkColumns)}
    assert {name for each in rows for name in each} <= names
    titles = [table.title for table in result_tables(rows)]
    assert titles == ["Links", "Transfers", "Latency + bytes / bandwidth", "With a codec"]
    assert "fp16 stops paying at 160 Mbit/s for tensors of 2 MB." in result_tables(rows)[-1].note
    drawn = plot_times(rows).panels["100mbit, one way"]["none"]
    assert drawn == [(WIRE, pytest.approx(100)), (2 * WIRE, pytest.approx(200))]


def test_live_lines_are_aligned_and_name_link_and_codec():
    links, codecs = ["100mbit/20mbit,40ms", "none"], ["none", "tile:8+zero"]
    rows = [
        {"link": link, "codec": codec, "ways": "one way", "tensor_bytes": 1000, "p50_ms": 1.0, "p95_ms": 2.0}
        for link in links
        for codec in codecs
    ]
    lines = [row_line({**each, "gb_per_s": 0.0001}, links, codecs) for each in rows]
    assert lines[2] == (
        "link not shaped           codec none         one way        1 kB: p50 1.000 ms, p95 2.000 ms, 0.800 Mbit/s"
    )
    assert len({line.index("one way") for line in lines}) == len(set(map(len, lines))) == 1


@pytest.mark.parametrize(
    ("mbit_per_s", "text"), [(0.0123456, "0.0123"), (0.8, "0.800"), (18.72, "18.7"), (51234.5, "51234"), (0.0, "0.00")]
)
def test_rates_have_three_digits_and_no_exponent(mbit_per_s, text):
    assert rate_text(mbit_per_s) == text


def test_rates_of_a_table_are_in_mbit_per_s_with_digits_for_the_lowest():
    rows = [{**row(), "gb_per_s": rate, "recv_gb_per_s": rate} for rate in (0.0001, 0.0125)]
    lines = plain_text(next(each for each in result_tables(rows) if each.title == "Transfers")).splitlines()
    assert "Mbit/s" in " ".join(lines[1:3])
    assert "GB/s" not in " ".join(lines[1:3])
    assert [" 0.800 " in lines[3], " 100.000 " in lines[4]] == [True, True]


def test_sizes_are_read():
    assert parse_sizes("1kB,1.5MB, 100MB,4B,1kb") == (1_000, 1_500_000, 100_000_000, 4)


@pytest.mark.parametrize("text", ["", "1", "big", "2B", "-1kB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="sizes are bytes of tensors"):
        parse_sizes(text)


def test_shaped_links_are_gloos():
    settings = LinkBenchOptions(
        sizes=(4,), compress=("sort:8",), links=(None,), device="cpu", repeat=1, budget_s=1, sender_delay_s=0
    )
    assert settings.codecs == ("none", "sort:6+2")
    assert settings.backend(None) == settings.backend(100.0) == "gloo"
