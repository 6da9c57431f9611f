"""Bounds, held against what is known of them."""

import pytest

from tests.lab.bench.pipeline.made_links import link
from thinpipe.lab.bench.pipeline.bounds import (
    Busy,
    Hop,
    bound_of_pipeline,
    bound_of_replicas,
    hops_of,
    ring_bytes,
)
from thinpipe.train.shaping import Shape, Shaping, parse_link, shaping_of

IDLE = Busy(0.0, 0.0)
MB = 1_000_000  # 80 ms at 100 Mbit/s
ROUND = [Hop(0, 1, MB), Hop(1, 0, 2 * MB), Hop(0, 1, MB), Hop(1, 0, MB)]  # client and server


def test_the_busiest_direction_is_a_workers_not_a_pairs():
    hops = [Hop(0, 1, 10), Hop(1, 2, 20), Hop(0, 2, 15), Hop(2, 0, 30)]
    for links in (None, shaping_of(100.0)):
        assert bound_of_pipeline(links, hops, [IDLE] * 3).busiest_wire_bytes == 35  # what worker 2 receives
    assert bound_of_pipeline(None, [], [IDLE]).busiest_wire_bytes == 0


def test_a_chunk_passes_all_links_forward_and_then_back():
    made = [link(0, 1, 80, stages=(2, 1)), link(1, 0, 60, stages=(1, 2)), link(1, 0, 90, stages=(1, 0)), link(0, 1, 50)]
    assert hops_of(made, steps=10) == [Hop(0, 1, 5), Hop(1, 0, 6), Hop(0, 1, 8), Hop(1, 0, 9)]


@pytest.mark.parametrize(
    ("links", "busy", "least_ms"),
    [
        ("100mbit", (0, 0), 240),  # three MB from the server
        ("100mbit", (200, 300), 300),
        ("400mbit/10mbit", (0, 0), 1600),  # two MB from the client
        ("100mbit,20ms", (0, 0), 240 + 40),  # nothing to send before one delay; the last needs one
        ("100mbit,20ms", (300, 0), 300),  # the client begins, and ends
        ("100mbit,20ms", (0, 300), 340),  # the server does neither
        ("100mbit/10mbit,20ms", (0, 0), 1640),  # what comes last from the client is answered
        ("10gbit,50ms", (0, 0), 200),  # there and back, twice
    ],
)
def test_delays_before_and_after_the_busiest_worker_or_link(links, busy, least_ms):
    bound = bound_of_pipeline(parse_link(links), ROUND, [Busy(ms, 0.0) for ms in busy])
    assert bound.bound_ms == pytest.approx(least_ms)


def test_an_update_hides_behind_the_delay_after_it():
    links = parse_link("20ms")
    assert bound_of_pipeline(links, ROUND, [IDLE, Busy(300.0, 15.0)]).bound_ms == 340
    assert bound_of_pipeline(links, ROUND, [IDLE, Busy(300.0, 45.0)]).bound_ms == 365


def test_a_line_of_workers_has_all_delays_around_its_last_one():
    hops = [Hop(0, 1, MB), Hop(1, 2, MB), Hop(2, 1, MB), Hop(1, 0, MB)]
    bound = bound_of_pipeline(parse_link("100mbit,20ms"), hops, [IDLE, IDLE, IDLE])
    assert (bound.busiest_wire_ms, bound.delay_ms) == (
        160,
        80,
    )  # the worker in the middle sends two MB to its neighbours
    assert bound.bound_ms == pytest.approx(160 + 40)
    assert bound_of_pipeline(parse_link("100mbit,20ms"), hops, [IDLE, IDLE, Busy(130.0, 0.0)]).bound_ms == 130 + 80
    two = bound_of_pipeline(parse_link("100mbit,20ms"), [Hop(0, 1, MB), Hop(1, 0, MB)], [IDLE, IDLE])
    assert two.bound_ms == pytest.approx(80 + 40)


def test_pairs_have_bounds_of_their_own():
    pairs = Shaping(Shape(1000, 1000, 5), (((0, 1), Shape(100, 20, 40)),), file="links.toml")
    hops = [Hop(0, 1, MB), Hop(1, 2, MB), Hop(2, 0, MB), Hop(0, 2, MB), Hop(2, 1, MB), Hop(1, 0, MB)]
    bound = bound_of_pipeline(pairs, hops, [IDLE] * 3)
    assert (bound.busiest_wire_ms, bound.delay_ms) == (400, 2 * 40 + 4 * 5)
    assert bound.bound_ms == pytest.approx(400 + 100)


def test_bytes_of_a_ring_all_reduce():
    assert ring_bytes(1000, 1) == 0
    assert ring_bytes(1000, 2) == 1000
    assert ring_bytes(1000, 4) == 1500
    bound = bound_of_replicas(parse_link("100mbit/10mbit,20ms"), MB, [Busy(30.0, 2.0), IDLE])
    assert (bound.busiest_compute_ms, bound.busiest_wire_ms, bound.busiest_wire_bytes, bound.bound_ms) == (
        32,
        800,
        MB,
        820,
    )
    assert bound_of_replicas(None, MB, [Busy(30.0, 2.0)]).bound_ms == 32
