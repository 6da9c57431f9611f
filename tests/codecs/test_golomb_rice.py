"""Golomb-Rice codes: the error of each block size, the allotment of the bit budget, and the gain over fixed codes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import thinpipe
from tests.codecs.helpers import round_trip
from thinpipe.codecs.golomb_rice import CODED_BLOCK, LARGEST_SIZE, allot, error_left, forms, sections, size_table
from thinpipe.codecs.kernels import select
from thinpipe.codecs.kernels.cpu.loops.rice_code import allot as allot_on_cpu
from thinpipe.codecs.kernels.reference import golomb_rice as reference
from thinpipe.codecs.kernels.reference.lloyd_max import rotated


def rows(deviations: Tensor) -> Tensor:
    """A block for each deviation."""
    drawn = torch.randn(len(deviations), CODED_BLOCK, generator=torch.Generator().manual_seed(0))
    return drawn * deviations[:, None]


def unlike(blocks: int) -> Tensor:
    return rows(torch.randn(blocks, generator=torch.Generator().manual_seed(1)).exp())


def sizes_on_wire(spec: str, x: Tensor) -> Tensor:
    blocks = x.numel() // CODED_BLOCK
    first, _ = sections(blocks, 0)
    return thinpipe.codec(spec).encode(x)[first : first + blocks].long()


def lost(spec: str, x: Tensor) -> float:
    return ((round_trip(spec, x) - x).square().sum() / x.square().sum()).item()


def test_forms_fill_their_size() -> None:
    assert min(forms()) == 8
    assert max(forms()) == LARGEST_SIZE
    for size, form in forms().items():
        assert 8 * form.planes + form.rest == size
        assert form.planes <= 8  # a value's planes are those of one byte
        assert form.high == 0 or form.rest > 0


@pytest.mark.parametrize("size", forms())
def test_each_size_has_the_error_it_is_chosen_by(size: int) -> None:
    """Return the error of normal values, with unbiased scales."""
    _, blocks = rotated(rows(torch.ones(400)), CODED_BLOCK, 0, 1, 0)
    magnitudes, _ = reference._magnitudes(blocks, torch.full((400,), size, dtype=torch.int32))
    levels = (2 * magnitudes + 1) * blocks.rows.sign()
    scale = blocks.rows.square().sum(1) / (blocks.rows * levels).sum(1)
    error = (levels * scale[:, None] - blocks.rows).square().sum() / blocks.rows.square().sum()
    assert error.item() == pytest.approx(error_left(size), rel=0.03)


def test_every_larger_size_gains_less_per_unit() -> None:
    sizes = list(forms())
    gains = [(error_left(a) - error_left(b)) / (b - a) for a, b in itertools.pairwise(sizes)]
    assert gains == sorted(gains, reverse=True)
    assert size_table(torch.device("cpu")).unique().tolist() == sizes


def test_blocks_of_more_energy_get_more_bytes() -> None:
    sizes = sizes_on_wire("gauss:3+coded", rows(torch.tensor([1.0, 4.0, 16.0, 64.0])))
    assert sizes.tolist() == sorted(sizes.tolist())
    assert sizes[3] >= sizes[0] + 24  # 8 for a bit, which a factor of four is worth


@pytest.mark.parametrize("bits", [1, 1.5, 2.75, 3, 5.1, 8])
def test_blocks_share_the_budget_for_all_values(bits: float) -> None:
    made = {
        "normal": torch.randn(40 * 256),
        "alike": torch.ones(40 * 256),
        "zeros": torch.zeros(40 * 256),
        "one block": torch.cat([torch.randn(256), torch.zeros(39 * 256)]),
        "NaN": torch.full((40 * 256,), torch.nan),
        "every scale": rows(torch.logspace(-45, 38, 40)).flatten(),
    }
    for x in made.values():
        given = sizes_on_wire(f"gauss:{bits}+coded", x)
        assert set(given.tolist()) <= set(forms())
        assert given.sum() <= int(40 * 8 * bits)


@pytest.mark.parametrize("bits", [2.5, 3, 3.35, 4, 5, 6])
def test_nearly_all_of_the_budget_is_used(bits: float) -> None:
    for x in (rows(torch.ones(500)), unlike(500)):
        assert sizes_on_wire(f"gauss:{bits}+coded", x).sum() > 0.985 * 500 * 8 * bits


def test_reference_and_cpu_allot_the_same_sizes() -> None:
    drawn = torch.Generator().manual_seed(0)
    for spread in (0, 3, 200, 20000):
        energies = torch.randint(0, spread + 1, (500,), generator=drawn, dtype=torch.int32)
        for budget in (4000, 4001, 9876, 16001, 32000):
            found = torch.empty(500, dtype=torch.int32)
            allot_on_cpu(energies.numpy(), size_table(energies.device).numpy(), budget, found.numpy())
            assert torch.equal(found, allot(energies, budget))
            assert found.sum() <= budget


@pytest.mark.parametrize("option", ["", "+unbiased"])
@pytest.mark.parametrize("bits", [3, 4, 5])
def test_less_is_lost_than_by_levels_of_as_many_bits(bits: int, option: str) -> None:
    """The same for equal blocks. The wire is 0.03 bits larger, which is worth a 24th of the error."""
    alike = rows(torch.ones(400))
    assert lost(f"gauss:{bits}+coded{option}", alike) < 0.78 * lost(f"gauss:{bits}{option}", alike)
    assert lost(f"gauss:{bits}+coded{option}", unlike(400)) < 0.25 * lost(f"gauss:{bits}{option}", unlike(400))


def test_a_fraction_of_a_bit_is_worth_one() -> None:
    errors = [lost(f"gauss:{bits}+coded", unlike(400)) for bits in (1, 1.5, 2, 2.25, 2.5, 2.75, 3, 4, 5, 6.5, 8)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("bits", [1, 2.5, 3.35, 5, 8])
def test_values_that_no_code_expects_still_fit(bits: float) -> None:
    """Rotated, a spike has the same magnitude everywhere, and what two of them have is of four magnitudes."""
    x = torch.zeros(64, CODED_BLOCK)
    x[torch.arange(64), torch.arange(64)] = torch.logspace(-3, 3, 64)
    x[32:, 0] += 0.3
    spec = f"gauss:{bits}+coded+unbiased"
    assert lost(spec, x) < 1.5 * lost(spec, unlike(64))


@pytest.mark.parametrize("damage", ["sizes", "payload", "all ones"])
def test_a_damaged_wire_is_read_within_bounds(damage: str) -> None:
    """Alike on all machines, and nothing beyond the wire."""
    x = unlike(40).flatten()
    codec = thinpipe.codec("gauss:3.35+coded")
    wire, drawn = codec.encode(x), torch.Generator().manual_seed(0)
    first, second = sections(40, 0)
    if damage == "all ones":
        wire[first:] = 255
    else:
        part = wire[first : first + 40] if damage == "sizes" else wire[second:]
        part.copy_(torch.randint(0, 256, part.shape, generator=drawn, dtype=torch.uint8))
    ours, right = (
        thinpipe.codec(codec.spec, kernels=select(name, wire.device)).decode(wire, torch.empty_like(x))
        for name in ("auto", "reference")
    )
    assert torch.equal(ours, right)
