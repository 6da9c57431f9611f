"""Gathering, scattering and transposing bits, with the processor's instructions and without."""

import numpy as np
import pytest
from numba import njit

from thinpipe.codecs.kernels.cpu.loops import bits


@njit
def _gathered(word, mask):
    return bits.gather(word, mask), bits.gather_by_loop(word, mask)


@njit
def _scattered(word, mask):
    return bits.scatter(word, mask), bits.scatter_by_loop(word, mask)


@njit
def _ones(word):
    return bits.ones_of(word)


@pytest.mark.parametrize("mask", [0, 1, 0b1011_0000, 1 << 63, 0xF0F0_1234_0000_8001, (1 << 64) - 1])
def test_bits_are_gathered_and_scattered_by_a_mask(mask):
    word = 0x9E37_79B9_7F4A_7C15
    places = [place for place in range(64) if mask >> place & 1]
    gathered = sum((word >> place & 1) << k for k, place in enumerate(places))
    scattered = sum((word >> k & 1) << place for k, place in enumerate(places))
    assert _gathered(np.uint64(word), np.uint64(mask)) == (gathered, gathered)
    assert _scattered(np.uint64(word), np.uint64(mask)) == (scattered, scattered)
    assert _ones(np.uint64(mask)) == len(places)


def test_transposition_turns_values_into_planes_and_back():
    values = np.random.default_rng(0).integers(0, 256, 256).astype(np.uint8)
    planes, back = np.zeros(32, np.uint64), np.zeros(32, np.uint64)
    bits.transpose_bits(values.view(np.uint64), planes)
    pieces = values.reshape(8, 32)
    for bit in range(8):
        expected = sum((pieces[k] >> bit & 1) << k for k in range(8)).astype(np.uint8)
        assert np.array_equal(planes.view(np.uint8).reshape(8, 32)[bit], expected)
    bits.transpose_bits(planes, back)
    assert np.array_equal(back.view(np.uint8), values)
