"""What does not fit into memory is told with both sizes."""

import pytest

from thinpipe.measure import memory
from thinpipe.measure.memory import check_fits, memory_bytes


def test_more_than_there_is_says_both_sizes(monkeypatch):
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 2_000_000_000)
    check_fits("a tensor", 2_000_000_000, "take less")
    with pytest.raises(ValueError, match="a tensor takes 3 GB or more, and this machine has 2 GB; take less"):
        check_fits("a tensor", 3_000_000_000, "take less")


def test_a_container_may_have_less_than_the_machine(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CONTAINER", limit)
    machine = memory_bytes()
    assert machine > 1 << 28
    limit.write_text("max\n")
    assert memory_bytes() == machine
    limit.write_text("1048576\n")
    assert memory_bytes() == 1048576
