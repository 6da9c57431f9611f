"""Keys of stochastic rounding: different for every message, the same whenever it is sent again."""

from itertools import product

import torch

from thinpipe.codecs.kernels.reference import _draws
from thinpipe.codecs.rounding import rounding_key


def test_no_two_names_of_a_grid_share_a_key():
    """Seeds, two directions of two links, slots, steps, chunks: also neighbours and swapped numbers."""
    links = [(0, 1), (1, 0), (1, 2), (2, 1)]
    names = [
        (seed, source, target, slot, step, chunk)
        for seed, (source, target), slot, step, chunk in product(range(4), links, range(3), range(200), range(8))
    ]
    keys = {rounding_key(*name) for name in names}
    assert len(keys) == len(names)
    assert all(0 <= key < 1 << 64 for key in keys)
    # Draws depend on both halves of a key; either alone must not repeat more than chance would have it.
    assert len({key >> 32 for key in keys}) > len(names) - 10
    assert len({key & 0xFFFFFFFF for key in keys}) > len(names) - 10


def test_keys_take_any_integer():
    keys = [rounding_key(number) for number in (0, 1, -1, 2**31, 2**63, 2**64 - 2)]
    assert len(set(keys)) == len(keys)
    assert rounding_key(3, 4) != rounding_key(4, 3)


def test_the_first_draws_are_those_that_the_definition_gives():
    """The definition in Python's own integers."""

    def mix(z: int) -> int:
        z ^= z >> 16
        z = z * 0x7FEB352D % 2**32
        z ^= z >> 15
        z = z * 0x846CA68B % 2**32
        return z ^ z >> 16

    key = 0xFEDCBA9876543210
    expected = [(mix((mix(i ^ 0x76543210) + 0xFEDCBA98) % 2**32) >> 8) / 2**24 for i in range(1000)]
    assert _draws(1000, key, torch.device("cpu")).tolist() == expected


def test_draws_are_even_and_do_not_follow_each_other():
    for key in (0, 1, rounding_key(1, 2, 3)):
        draws = _draws(100_000, key, torch.device("cpu")).double()
        assert draws.min() >= 0
        assert draws.max() < 1
        counts = torch.histc(draws, 100, 0, 1)
        assert ((counts - 1000) / 1000**0.5).square().mean() < 1.6  # chi-squared of 99, ten thousandth
        neighbours = torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1]
        assert abs(neighbours) < 5 / 100_000**0.5
