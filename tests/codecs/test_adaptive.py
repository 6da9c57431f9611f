"""Bits that blocks share: where they go, that all are used, and what that gains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinpipe
from tests.codecs.helpers import round_trip
from thinpipe.codecs.adaptive import allot, sections, worth
from thinpipe.codecs.kernels import select
from thinpipe.codecs.kernels.cpu.loops.adaptive import allot as allot_on_cpu
from thinpipe.codecs.normal import distortion


def rows(deviations: Tensor, width: int = 256) -> Tensor:
    """A block for each deviation."""
    return torch.randn(len(deviations), width, generator=torch.Generator().manual_seed(0)) * deviations[:, None]


def bits_on_wire(spec: str, x: Tensor) -> Tensor:
    codec = thinpipe.codec(spec)
    blocks = x.numel() // codec.tile
    first, _ = sections(blocks, 0)
    return codec.encode(x)[first : first + blocks].long()


def lost(spec: str, x: Tensor) -> float:
    return ((round_trip(spec, x) - x).square().sum() / x.square().sum()).item()


def test_blocks_of_more_energy_get_more_bits() -> None:
    """The sixth bit of a block of energy 4096 takes 7.6 away, the second bit of one of 16 only 3.9."""
    bits = bits_on_wire("gauss:3+adaptive", rows(torch.tensor([1.0, 4.0, 16.0, 64.0])))
    assert bits.tolist() == [1, 1, 4, 6]
    assert bits_on_wire("gauss:3+adaptive", rows(torch.tensor([64.0, 16.0, 4.0, 1.0]))).tolist() == [6, 4, 1, 1]


@pytest.mark.parametrize("bits", [1, 1.5, 2.75, 3, 8])
def test_all_bits_are_used_whatever_the_values(bits: float) -> None:
    made = {
        "normal": torch.randn(40 * 256),
        "zeros": torch.zeros(40 * 256),
        "one block": torch.cat([torch.randn(256), torch.zeros(39 * 256)]),
        "NaN": torch.full((40 * 256,), torch.nan),
        "every scale": rows(torch.logspace(-45, 38, 40)).flatten(),
    }
    for x in made.values():
        given = bits_on_wire(f"gauss:{bits}+adaptive", x)
        assert given.sum() == int(40 * bits)
        assert given.min() >= 1
        assert given.max() <= 8


def test_of_equal_blocks_the_first_have_a_bit_more() -> None:
    assert bits_on_wire("gauss:2.5+adaptive", torch.ones(8 * 256)).tolist() == [3, 3, 3, 3, 2, 2, 2, 2]


@pytest.mark.parametrize("unbiased", [False, True])
def test_both_ways_to_allot_agree(unbiased: bool) -> None:
    drawn = torch.Generator().manual_seed(0)
    for spread in (0, 3, 200, 20000):
        energies = torch.randint(0, spread + 1, (500,), generator=drawn, dtype=torch.int32)
        for planes in (500, 501, 1234, 1600, 3999, 4000):
            counted = torch.empty(500, dtype=torch.uint8)
            allot_on_cpu(
                energies.numpy(),
                torch.tensor(worth(unbiased), dtype=torch.int32).numpy(),
                planes - 500,
                counted.numpy(),
            )
            assert torch.equal(counted, allot(energies, planes, unbiased))
            assert counted.sum() == planes


def test_no_other_bits_of_whole_blocks_lose_less() -> None:
    """Moving a bit from any block to any other takes less away than it adds, but for how finely energies are told."""
    deviations = torch.randn(60, generator=torch.Generator().manual_seed(1)).exp()
    given = bits_on_wire("gauss:3+adaptive", rows(deviations))
    energies = rows(deviations).square().mean(1)
    error = torch.tensor([distortion(bits) for bits in range(9)])
    won = [energies[b] * (error[given[b]] - error[given[b] + 1]) for b in range(60) if given[b] < 8]
    spent = [energies[b] * (error[given[b] - 1] - error[given[b]]) for b in range(60) if given[b] > 1]
    assert max(won) < 1.1 * min(spent)


@pytest.mark.parametrize("option", ["", "+unbiased"])
def test_less_is_lost_where_blocks_differ_and_no_more_where_not(option: str) -> None:
    alike, unlike = rows(torch.ones(400)), rows(torch.randn(400, generator=torch.Generator().manual_seed(2)).exp())
    for bits in (2, 3):
        assert lost(f"gauss:{bits}+adaptive{option}", alike) < 1.01 * lost(f"gauss:{bits}{option}", alike)
        assert lost(f"gauss:{bits}+adaptive{option}", unlike) < 0.5 * lost(f"gauss:{bits}{option}", unlike)


def test_a_fraction_of_a_bit_is_worth_one() -> None:
    x = rows(torch.randn(400, generator=torch.Generator().manual_seed(3)).exp())
    errors = [lost(f"gauss:{bits}+adaptive", x) for bits in (2, 2.25, 2.5, 2.75, 3)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("bits", [0, 9, 255])
def test_bits_of_a_damaged_wire_are_read_within_bounds(bits: int) -> None:
    """Alike on all machines, and nothing beyond the wire."""
    x = rows(torch.ones(40)).flatten()
    codec = thinpipe.codec("gauss:2+adaptive")
    wire = codec.encode(x)
    first, _ = sections(40, 0)
    wire[first : first + 40] = bits
    ours, right = (
        thinpipe.codec(codec.spec, kernels=select(name, wire.device)).decode(wire, torch.empty_like(x))
        for name in ("auto", "reference")
    )
    assert torch.equal(ours, right)
