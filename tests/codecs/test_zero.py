"""+zero: a zero comes back as zero, whatever else is in the tensor, and nothing else is lost."""

import pytest
import torch

import thinpipe
from tests.codecs.helpers import content, round_trip, squared_error
from thinpipe.codecs.layout import bucket_values, move_to_zero

SPECS = ["uniform:2+zero", "uniform:4+zero", "uniform:16+zero", "sort:3+1+zero", "fast:6+2+zero", "kmeans:3+zero"]


def gradient_with_zeros(count: int = 30_001) -> torch.Tensor:
    """Values of both signs about 3e-4, so that no cut is at zero, and here and there a zero."""
    return (content("laplace", (count,)) + 3e-4) * (torch.arange(count) % 50 > 0)


@pytest.mark.parametrize("written", ["sort:4+zero", "sort:3+1+zero"])
def test_the_canonical_spec_keeps_it(written):
    codec = thinpipe.codec(written)
    assert codec.spec == "sort:3+1+zero"
    assert codec != thinpipe.codec("sort:4")
    assert codec.wire_bytes((1000,), torch.float32) == thinpipe.codec("sort:4").wire_bytes((1000,), torch.float32)


@pytest.mark.parametrize("spec", ["uniform:1+zero", "sort:1+3+zero", "fast:1+zero", "sort:2+zero"])
def test_two_levels_are_too_few(spec):
    with pytest.raises(ValueError, match=r"2 level bits or more.*optionally followed by \+zero"):
        thinpipe.codec(spec)


@pytest.mark.parametrize("spec", ["uniform:8+sr", "kmeans:4+zero+zero", "topk:0.1+zero", "sort:6+zero+2"])
def test_options_that_make_no_sense(spec):
    with pytest.raises(ValueError, match="makes no sense"):
        thinpipe.codec(spec)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zeros_come_back_as_zeros(spec, kernels, dtype):
    x = gradient_with_zeros().to(dtype)
    assert (round_trip(spec, x, kernels)[x == 0] == 0).all()
    assert (round_trip(spec.removesuffix("+zero"), x, kernels)[x == 0] != 0).any()


@pytest.mark.parametrize("level_bits", range(2, 17))
def test_a_level_is_zero_for_every_number_of_bits(level_bits):
    """Ends of every scale that float32 has, one pair of them a bucket."""
    generator = torch.Generator().manual_seed(level_bits)
    size = torch.exp2(torch.empty(2, 64).uniform_(-148, 120, generator=generator))
    size[1, ::2] = size[0, ::2] * torch.empty(32).uniform_(0.1, 10, generator=generator)
    lo, hi = move_to_zero(-size[0], size[1], level_bits)
    values = bucket_values(lo, hi, level_bits).view(64, -1)
    assert (values == 0).any(1).all()
    step = (hi.double() - lo.double()) / ((1 << level_bits) - 1)
    assert (-size[0] >= lo.double() - step / 2).all()
    assert (size[1] <= hi.double() + 0.501 * step).all()
    assert (
        step <= (size[0].double() + size[1]) / ((1 << level_bits) - 1) * (1 + 2.0 ** (level_bits - 23)) + 2.0**-149
    ).all()


def test_a_least_value_half_a_step_from_a_level_gets_one_below_it():
    """Rounding must not find it at level -1: -1.5 to 1.5 in steps of 1 is -2 to 1, not -1 to 2."""
    lo, hi = move_to_zero(torch.tensor([-1.5]), torch.tensor([1.5]), 2)
    assert (lo.item(), hi.item()) == (-2, 1)


@pytest.mark.parametrize("spec", ["uniform:2+zero", "uniform:5+zero", "uniform:12+zero"])
@pytest.mark.parametrize("low", [-1e-9, -0.01, -0.5, -1.0, -100.0])
def test_no_value_is_off_by_more_than_half_a_step(spec, low):
    x = torch.linspace(low, 1, 10_001)
    levels = (1 << thinpipe.codec(spec).bits) - 1
    assert (round_trip(spec, x) - x).abs().max() <= 0.502 * (1 - low) / levels * 1.01


@pytest.mark.parametrize("spec", ["uniform:4+zero", "sort:3+1+zero", "fast:4+2+zero"])
def test_cpu_and_literal_kernels_write_the_same_wire(spec):
    x = content("laplace", (30_001,))
    assert torch.equal(thinpipe.codec(spec).encode(x), thinpipe.codec(spec, kernels="reference").encode(x))


@pytest.mark.parametrize("spec", SPECS)
def test_only_the_encoder_knows(spec):
    x = gradient_with_zeros()
    wire = thinpipe.codec(spec).encode(x)
    plain = thinpipe.codec(spec.removesuffix("+zero"))
    assert torch.equal(plain.decode(wire, torch.empty_like(x)), round_trip(spec, x))


@pytest.mark.parametrize(
    ("spec", "least"), [("uniform:4", 0.0), ("sort:3+1", 0.0), ("uniform:4", 1.0), ("sort:3+1", 1.0), ("kmeans:4", 1.0)]
)
def test_zero_at_an_end_or_out_of_range_changes_nothing(spec, least):
    x = content("laplace", (5000,)).abs() + least
    x[0] = least
    assert torch.equal(thinpipe.codec(f"{spec}+zero").encode(x), thinpipe.codec(spec).encode(x))


@pytest.mark.parametrize("spec", ["uniform:8+zero", "sort:6+2+zero", "kmeans:4+zero"])
def test_the_largest_floats_stay_finite(spec):
    x = torch.linspace(-1, 1, 4001) * torch.finfo(torch.float32).max
    x[0], x[-1] = -torch.finfo(torch.float32).max, torch.finfo(torch.float32).max
    assert round_trip(spec, x).isfinite().all()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_codebook_gives_up_the_value_nearest_zero(kernels):
    x = gradient_with_zeros()
    plain, ours = squared_error("kmeans:3", x, kernels), squared_error("kmeans:3+zero", x, kernels)
    assert ours <= 1.1 * plain


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("values", [[-0.5, 1.0], [-1.0, 0.5, 1.0]], ids=str)
def test_a_codebook_with_an_unused_entry_loses_nothing(values, kernels):
    x = torch.tensor(values)[torch.randint(0, len(values), (5000,))]
    assert torch.equal(round_trip("kmeans:2+zero", x, kernels), x)
