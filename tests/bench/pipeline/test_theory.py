"""Bounds and bubbles, held against what is known of them."""

import pytest
from made_links import link

from thinpipe.bench.pipeline.rows import busiest_direction_bytes, makespan, ring_bytes, wire_ms
from thinpipe.pipeline.order import make_order


def test_the_busiest_direction_is_a_workers_not_a_pairs():
    links = [link(0, 1, 10), link(1, 2, 20), link(0, 2, 15), link(2, 0, 30)]
    assert busiest_direction_bytes(links) == 35  # what worker 2 receives; nobody sends more than 30
    assert busiest_direction_bytes([]) == 0


def test_what_a_ring_sends():
    assert ring_bytes(1000, 1) == 0
    assert ring_bytes(1000, 2) == 1000
    assert ring_bytes(1000, 4) == 1500


def test_bytes_over_a_rate():
    assert wire_ms(1_000_000, 100) == pytest.approx(80)
    assert wire_ms(1_000_000, None) == 0


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("workers", "chunks"), [(2, 4), (3, 8), (4, 4)])
def test_a_line_of_equal_stages_has_the_bubble_of_the_books(order, workers, chunks):
    orders = make_order(order, list(range(workers)), chunks)
    took = makespan(orders, lambda action: 1.0 if action.kind == "F" else 2.0)
    assert took == 3 * (chunks + workers - 1)


def test_a_client_with_both_ends():
    orders = make_order("gpipe", [0, 1, 0], 1)
    assert makespan(orders, lambda action: 1.0) == 6  # one chunk: everything after everything
