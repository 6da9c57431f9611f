"""Sizes as users write them; what does not fit into memory is reported with both sizes."""

import pytest

from thinpipe.system import sizes
from thinpipe.system.sizes import check_fits, memory_bytes, parse_size, size_text


def test_thousands_and_powers_of_two():
    assert [parse_size(text) for text in ("4B", "1kB", "1.5MB", "2 GB", "1KiB", "0.5MiB", "4GiB")] == [
        4,
        1_000,
        1_500_000,
        2_000_000_000,
        1024,
        524_288,
        4 * 2**30,
    ]
    assert [size_text(size) for size in (4, 1_000, 1_500_000)] == ["4 B", "1 kB", "1.5 MB"]


@pytest.mark.parametrize("text", ["", "4", "GiB", "-1MB", "1 parsec"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="a size is a number with its unit"):
        parse_size(text)


def test_more_than_the_memory_reports_both_sizes(monkeypatch):
    monkeypatch.setattr(sizes, "memory_bytes", lambda device: 2_000_000_000)
    check_fits("a tensor", 2_000_000_000, "take less")
    with pytest.raises(ValueError, match="a tensor takes 3 GB or more, and this machine has 2 GB; take less"):
        check_fits("a tensor", 3_000_000_000, "take less")


def test_a_container_may_have_less_than_the_machine(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(sizes, "_CONTAINER", limit)
    machine = memory_bytes()
    assert machine > 1 << 28
    limit.write_text("max\n")
    assert memory_bytes() == machine
    limit.write_text("1048576\n")
    assert memory_bytes() == 1048576
