"""Tags: every message of a step has its own, and what has none is refused."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from thinpipe.links.slot import Route


def route(source: int, target: int) -> Route:
    return Route(source, target, True, torch.device("cpu"), None)


def test_no_two_messages_have_one_tag() -> None:
    links = [(0, 1), (1, 2), (1, 0), (2, 1), (1022, 1023), (1023, 1022)]
    chunks, slots = (0, 1, 2, 16383), (0, 1, 31)
    tags = {route(*link).tag(chunk, slot) for link, chunk, slot in product(links, chunks, slots)}
    assert len(tags) == len(links) * len(chunks) * len(slots)
    assert all(1 << 30 <= tag < 1 << 31 for tag in tags)  # gloo's tags are 32 bits with a sign; users' are small


@pytest.mark.parametrize(
    ("link", "chunks", "slots", "complaint"),
    [
        ((1023, 1024), 1, 1, "at most 1024 stages, got 1025"),
        ((0, 1), 16385, 1, "at most 16384 chunks, got 16385"),
        ((0, 1), 1, 33, "at most 32 tensors between two stages, got 33"),
    ],
)
def test_messages_beyond_the_tags_are_rejected(link: tuple[int, int], chunks: int, slots: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        route(*link).check_limits(chunks, slots)
