"""Sizes as users write them."""

import pytest

from thinpipe.measure.sizes import parse_size, size_text


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
