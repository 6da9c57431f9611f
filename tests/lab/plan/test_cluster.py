"""Clusters from TOML: machines, both directions of links, and one line for what is wrong."""

from typing import Any

import pytest

from thinpipe.lab.plan.cluster import parse_cluster, read_cluster, shipped
from thinpipe.options import OptionError
from thinpipe.train.shaping import Queue

HOME = {"tflops": 1, "memory": "16GiB", "down": "100mbit", "up": "20mbit"}
LAB = {"tflops": 40, "count": 2}
LINKS = {"default": "1gbit", "home - lab": "200mbit/50mbit,15-25ms,0.1%"}


def parsed(**changes: Any) -> Any:
    return parse_cluster("test", {"machines": {"home": HOME, "lab": LAB}, "links": LINKS} | changes)


def test_names_and_counts() -> None:
    made = parsed()
    assert [each.name for each in made.machines] == ["home", "lab-0", "lab-1"]
    assert made.machines[0].memory_bytes == 16 << 30
    assert made.machines[2].memory_bytes is None


def test_a_path_has_the_queues_of_its_direction() -> None:
    there, back = parsed().path(0, 1), parsed().path(1, 0)
    assert there.queues == (Queue("home to lab-0", 50), Queue("home sends", 20))
    assert back.queues == (Queue("lab-0 to home", 200), Queue("home receives", 100))
    assert there.delay_ms == back.delay_ms == 20
    assert parsed().path(1, 2).queues == (Queue("lab-0 to lab-1", 1000),)
    assert there.wire_ms(1_000_000) == pytest.approx(400)


def test_a_lost_packet_delays_a_message_by_a_round_trip() -> None:
    path = parsed().path(0, 1)
    assert path.cost(100).delay_ms == pytest.approx(20 * (1 + 2 * 0.001))
    assert path.cost(15_000_000).delay_ms == pytest.approx(60, rel=0.01)


def test_scaled() -> None:
    faster = parsed().scaled(rate=2, delay=0.5).path(0, 1)
    assert [queue.mbit_per_s for queue in faster.queues] == [100, 40]
    assert faster.delay_ms == pytest.approx(12.5)  # jitter is not scaled


@pytest.mark.parametrize("name", shipped())
def test_all_machines_of_shipped_clusters_are_linked(name: str) -> None:
    made = read_cluster(name)
    count = len(made.machines)
    assert made.delays_ms(range(count)).shape == (count, count)
    assert (made.delays_ms(range(count)).sum() > 0) == (count > 1)
    if name == "worldwide-64":
        assert count == 64
        oregon, tokyo = ([each.name for each in made.machines].index(f"{city}-0") for city in ("oregon", "tokyo"))
        assert made.path(oregon, tokyo).delay_ms == 96
        assert made.path(tokyo, oregon).wire_ms(523e6 / 8) == pytest.approx(1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machines": {}}, "with a machine or more"),
        ({"speeds": {}}, r"not \[speeds\]"),
        ({"machines": {"home": {"memory": "1GB"}}}, "no tflops"),
        ({"machines": {"home": {"tflops": 1, "memroy": "1GB"}}}, r"memroy \(did you mean memory\?\)"),
        ({"machines": {"home": {"tflops": 0}}}, "tflops is a number above 0; got 0"),
        ({"machines": {"home": {"tflops": 1, "memory": "1 lot"}}}, "a size is a number"),
        ({"machines": {"home": {"tflops": 1, "down": "fast"}}}, "down: a link is a rate"),
        ({"machines": {"home": {"tflops": 1, "down": "10ms"}}}, "down is a rate"),
        ({"machines": {"home": {"tflops": 1, "count": 9999}}}, "count is a whole number"),
        ({"links": {"home - lob": "1gbit"}}, r"lob is none of them \(did you mean lab\?\)"),
        ({"links": {"home - lab": 5}}, "a link is a text"),
        ({"links": {"home - lab": "5parsec"}}, "a link is a rate"),
    ],
)
def test_one_line_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        parsed(**changes)
    assert "\n" not in str(raised.value)


def test_a_missing_link_is_named() -> None:
    made = parsed(links={"home - lab": "1gbit"})
    assert made.path(0, 2)
    with pytest.raises(OptionError, match=r"no link between lab-0 and lab-1: add a line .lab - lab."):
        made.path(1, 2)


def test_an_unknown_name() -> None:
    with pytest.raises(OptionError, match=r"lab-1gbit.*got two-home \(did you mean two-homes\?\)"):
        read_cluster("two-home")
