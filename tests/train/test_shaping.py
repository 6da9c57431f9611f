"""Link shaping: read from text and from files, written back, and turned into the queues of every pair."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from thinpipe.train.shaping import (
    Shape,
    Shaping,
    link_facts,
    link_text,
    list_facts,
    parse_link,
    parse_links,
    shaping_of,
)


@pytest.mark.parametrize(
    ("text", "mbit_per_s"),
    [("100mbit", 100.0), ("1gbit", 1000.0), ("2.5Gbit", 2500.0), ("500kbit", 0.5), ("25", 25.0), ("none", None)],
)
def test_rates_are_read_and_written(text: str, mbit_per_s: float | None) -> None:
    links = parse_link(text)
    assert links == (None if mbit_per_s is None else shaping_of(mbit_per_s))
    assert links is None or links.plain_mbit_per_s == mbit_per_s
    assert parse_link(link_text(links)) == links
    assert link_facts(links) == {"link_mbit_per_s": mbit_per_s}


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("100mbit/20mbit,40ms,0.1%", Shape(100, 20, 40, 0, 0.001)),
        ("1gbit/500kbit", Shape(1000, 0.5)),
        ("10mbit,1.5s", Shape(10, 10, 1500)),
        ("10mbit,2%", Shape(10, 10, loss=0.02)),
        ("40ms", Shape(delay_ms=40)),
        ("none,40ms", Shape(delay_ms=40)),
        ("0.5%", Shape(loss=0.005)),
        ("10mbit, 0-5ms", Shape(10, 10, 0, 5)),
        ("10mbit,2%,20-30ms", Shape(10, 10, 20, 10, 0.02)),
    ],
)
def test_delays_losses_and_two_rates(text: str, shape: Shape) -> None:
    links = parse_link(text)
    assert links == Shaping(shape)
    assert links.plain_mbit_per_s is None
    assert parse_link(link_text(links)) == links
    assert link_facts(links) == {"link_mbit_per_s": None, "link": link_text(links)}


@pytest.mark.parametrize(
    "text",
    [
        *("", "fast", "0mbit", "-1mbit", "10mb", "10 mbit/s", "100mbit,", "1e30gbit", "601gbit", "9" * 400),
        *("0.0000001kbit", "10mbit/", "/10mbit", "1mbit/2mbit/3mbit", "10mbit,20ms,30ms", "10mbit,1%,2%", "100%"),
        *("10mbit,11s", "10mbit,30-20ms", "10mbit,-5ms", "10mbit,40 ms", "10mbit/none"),
    ],
)
def test_an_invalid_link_is_an_error_with_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match="link is a rate from 1kbit to 600gbit"):
        parse_links(text)


def test_a_list_of_links() -> None:
    assert parse_links("10mbit, 1gbit,none,10mbit") == [shaping_of(10.0), shaping_of(1000.0), None]
    assert parse_links("10mbit,20ms,1%,5mbit/1mbit,none,30ms") == [
        *(Shaping(Shape(10, 10, 20, 0, 0.01)), Shaping(Shape(5, 1)), Shaping(Shape(delay_ms=30)))
    ]


def test_a_file_has_a_link_for_every_pair(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text('default = "1gbit,5ms"\n"0-1" = "100mbit/20mbit,40ms,0.1%"\n"1-2" = "none"\n')
    links = parse_link(str(path))
    assert links is not None
    assert (links.plain_mbit_per_s, link_text(links)) == (None, str(path))
    facts = {"file": str(path), "default": "1gbit,5ms", "0-1": "100mbit/20mbit,40ms,0.1%", "1-2": "none"}
    assert list_facts([links, None, shaping_of(10.0)]) == [facts, None, 10.0]
    assert link_facts(links) == {"link_mbit_per_s": None, "link": facts}
    paths = links.paths(3)
    facts = {pair: (p.queues[0].mbit_per_s, p.shape.delay_ms, p.shape.loss, p.mtu) for pair, p in paths.items()}
    assert facts == {
        (0, 1): (20, 40, 0.001, 1500), (1, 0): (100, 40, 0.001, 1500), (0, 2): (1000, 5, 0, 9000),
        (2, 0): (1000, 5, 0, 9000), (1, 2): (None, 0, 0, 9000), (2, 1): (None, 0, 0, 9000),
    }  # fmt: skip
    assert len({queue for path in paths.values() for queue in path.queues}) == 6
    links.check(3)
    with pytest.raises(ValueError, match=r"has a link of the pair 1-2, and workers are numbered from 0 to 1"):
        links.check(2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('"1-0" = "1mbit"', "the lower number of the pair first; got 1-0 = '1mbit'"),
        ("default = 100", "got default = 100"),
        ('server = "1mbit"', "got server = '1mbit'"),
        ('"0-1" = "fast"', "0-1: link is a rate from 1kbit to 600gbit"),
        ('"0-1" =', "cannot be read as links of pairs of workers"),
    ],
)
def test_a_file_with_other_content_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{re.escape(message)}"):
        parse_link(str(path))


def test_workers_have_one_interface_if_all_links_are_equal() -> None:
    paths = Shaping(Shape(100, 20, 40)).paths(3)
    names = {pair: [(queue.name, queue.mbit_per_s) for queue in path.queues] for pair, path in paths.items()}
    assert names[0, 1] == [("0 sends", 20), ("1 receives", 100)]
    assert names[0, 2] == [("0 sends", 20), ("2 receives", 100)]
    assert names[2, 0] == [("2 sends", 100), ("0 receives", 100)]
    assert names[1, 2] == [("1 sends", 100), ("2 receives", 100)]
    two = Shaping(Shape(100, 20, 40)).paths(2)
    assert [queue.mbit_per_s for queue in two[0, 1].queues] == [20]
    assert [queue.mbit_per_s for queue in two[1, 0].queues] == [100]


def test_queues_hold_100_ms_or_a_round_trip_or_a_few_packets() -> None:
    for shape, max_wait_s in ((Shape(100, 100, 20), 0.1), (Shape(100, 100, 200), 0.4), (Shape(0.1, 0.1, 20), 1.92)):
        path = Shaping(shape).paths(2)[0, 1]
        assert path.max_wait_s(path.queues[0]) == pytest.approx(max_wait_s)
