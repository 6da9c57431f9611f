"""sort and fast against the literal Algorithms 1 and 2, uniform against the literal minimum and step."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import thinpipe
from tests.codecs.helpers import content, round_trip
from thinpipe.codecs.layout import read_header

CONTENTS = ["relu6", "outliers", "laplace"]
finite_floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=300)


def assert_same_as_literal(spec: str, x: torch.Tensor) -> None:
    codec, literal = thinpipe.codec(spec), thinpipe.codec(spec, kernels="reference")
    wire, right = codec.encode(x), literal.encode(x)
    for ours, theirs in zip(codec.mins_and_steps(wire), literal.mins_and_steps(right), strict=True):
        assert torch.equal(ours, theirs)
    decoded, expected = torch.empty_like(x), torch.empty_like(x)
    assert torch.equal(codec.decode(wire, decoded), literal.decode(right, expected))


SHAPES = [(8, 24, 56, 56), (8, 13, 768), (4, 32, 7, 7)]


@pytest.mark.parametrize("name", ["sort", "fast"])
@pytest.mark.parametrize("split_bits", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kind", CONTENTS)
def test_same_minimums_steps_and_values_as_the_literal_algorithm(name, split_bits, kind):
    shape = SHAPES[(split_bits + CONTENTS.index(kind)) % 3]
    assert_same_as_literal(f"{name}:{8 - split_bits}+{split_bits}", content(kind, shape))


@pytest.mark.parametrize("spec", ["sort:3+5", "sort:8+8", "fast:4+6"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_same_with_more_buckets_than_one_read_finds(spec, kind):
    assert_same_as_literal(spec, content(kind, (2, 13, 768)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", CONTENTS)
def test_same_for_other_float_types(dtype, kind):
    assert_same_as_literal("sort:6+2", content(kind, (8, 24, 56, 56)).to(dtype))


@pytest.mark.parametrize(
    "x",
    [
        torch.randint(0, 3, (40_000,)).float(),
        torch.randn(40_000).mul(2).round(),
        torch.cat([torch.zeros(30_000), torch.randn(10_000)]),
        torch.arange(40_000).float(),
        torch.arange(40_000).float().flip(0),
        torch.cat([torch.full((20_000,), -0.0), torch.zeros(20_000)]),
        torch.full((40_000,), 3.5).index_fill(0, torch.tensor([17]), 4.5),
        torch.logspace(-44, 38, 40_000, dtype=torch.float64).float(),
        torch.cat([torch.randn(20_000) * 1e-42, torch.randn(20_000) * 2e37]),
    ],
    ids=[
        "three-values",
        "rounded",
        "sparse",
        "rising",
        "falling",
        "signed-zeros",
        "one-odd",
        "all-scales",
        "two-scales",
    ],
)
@pytest.mark.parametrize("spec", ["sort:6+2", "fast:3+4", "uniform:8"])
def test_same_on_ties_orders_and_scales(spec, x):
    literal = round_trip(spec, x, kernels="reference")
    assert torch.equal(round_trip(spec, x), literal)


@settings(max_examples=150, deadline=None)
@given(
    values=finite_floats,
    level_bits=st.integers(1, 12),
    split_bits=st.integers(0, 4),
    name=st.sampled_from(["sort", "fast"]),
)
@example(values=[3.4028234663852886e38, -3.4028234663852886e38, 0.0], level_bits=1, split_bits=0, name="sort")
@example(values=[1.401298464324817e-45, 0.0, -1.401298464324817e-45], level_bits=8, split_bits=0, name="sort")
@example(values=[1e-38, 1e38], level_bits=6, split_bits=2, name="fast")
def test_no_value_is_off_by_more_than_half_a_step(values, level_bits, split_bits, name):
    x = torch.tensor(values)
    codec = thinpipe.codec(f"{name}:{level_bits}+{split_bits}")
    wire = codec.encode(x)
    decoded = codec.decode(wire, torch.empty_like(x)).double()
    mins, tops = read_header(wire, 2 << split_bits).double().view(2, -1)
    steps = (tops - mins) / ((1 << level_bits) - 1)
    error = (decoded - x.double()).abs()
    # A value belongs to a bucket that spans it; where it touches two, either may have taken it.
    scale = torch.maximum(mins.abs(), tops.abs())
    slack = scale * 2**-22 + 2.0**-149
    spans = (x.double()[:, None] >= mins - slack) & (x.double()[:, None] <= tops + slack)
    allowed = torch.where(spans, steps * (0.5 + 2**-10) + slack, -1.0).amax(1)
    assert (error <= allowed).all()


@pytest.mark.parametrize("spec", ["uniform:8", "sort:6+2", "fast:3+1"])
def test_extremes_and_zeros_of_a_relu_are_exact(spec):
    x = content("relu6", (16, 24, 56, 56))
    decoded = round_trip(spec, x)
    assert decoded[x == 0].eq(0).all()
    assert decoded.max() == x.max()


def test_worked_example_by_hand():
    # Sorted: 0 1 | 2 10. Buckets [0, 1] and [2, 10], 2-bit levels 0..3: 2 -> level 0, 10 -> level 3, steps 1/3 and 8/3.
    codec = thinpipe.codec("sort:2+1")
    wire = codec.encode(torch.tensor([10.0, 0.0, 2.0, 1.0]))
    mins, steps = codec.mins_and_steps(wire)
    assert mins.tolist() == [0, 2]
    assert steps.tolist() == pytest.approx([1 / 3, 8 / 3])
    header, codes = wire[:16], wire[16:]
    assert header.view(torch.float32).tolist() == [0, 2, 1, 10]
    # Codes 7 0 4 3: low two bits 3 0 | 0 3 in two rows of four pieces of one, then the high bit 1 0 1 0 in one byte.
    assert codes.tolist() == [0b0011, 0b1100, 0b0101]


@pytest.mark.parametrize("spec", ["sort:4+4", "fast:2+8"])
@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_fewer_values_than_buckets(spec, count):
    x = torch.randn(count)
    assert torch.equal(round_trip(spec, x), x)


@pytest.mark.parametrize("spec", ["uniform:4", "sort:4+0"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_values_as_far_apart_as_float32_allows_are_rounded_to_the_nearest_level(spec, kernels):
    x = torch.linspace(-1, 1, 4001) * 3e38
    lost = (round_trip(spec, x, kernels).double() - x.double()).abs().max()
    assert lost <= 6e38 / 15 / 2 * 1.001
