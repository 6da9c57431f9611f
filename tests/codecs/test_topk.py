"""topk: exactly the largest, in either form of positions, ties and damage included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinpipe
from tests.codecs.helpers import round_trip
from thinpipe.codecs.topk import TopK


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 1e-40]), min_size=1, max_size=400),
    fraction=st.sampled_from([0.001, 0.02, 1 / 32, 0.1, 0.5, 1.0]),
)
def test_keeps_the_largest_and_of_equal_ones_the_first(values, fraction):
    x = torch.tensor(values)
    codec = thinpipe.codec(f"topk:{fraction!r}")
    kept = codec.kept(len(values))
    where = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:kept]
    expected = torch.zeros_like(x)
    expected[where] = x[where]
    assert torch.equal(round_trip(codec.spec, x), expected)


FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize(
    ("fraction", "count", "dtype"),
    [
        (fraction, count, FLOATS[(i + j) % 4])
        for i, fraction in enumerate(["0.001", "0.02", "0.1", "0.7"])
        for j, count in enumerate([100, 70_001, 300_000, 600_001])
    ],
    ids=str,
)
def test_wire_equals_the_literal_one(fraction, count, dtype):
    x = torch.randn(count, dtype=torch.float64).to(dtype)
    ours, literal = (thinpipe.codec(f"topk:{fraction}", kernels=kernels) for kernels in ("auto", "reference"))
    wire = ours.encode(x)
    assert torch.equal(wire, literal.encode(x))
    out, expected = torch.full_like(x, 5.0), torch.full_like(x, 6.0)
    assert torch.equal(ours.decode(wire, out), literal.decode(wire, expected))


@pytest.mark.parametrize("spec", ["topk:0.1", "topk:0.01"])
def test_nan_counts_as_infinity(spec):
    """If more are equal than are kept, the first ones are kept."""
    x = torch.randn(30_000)
    x[1000:6000] = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan, 1.0]).repeat(1000)
    ours, literal = (thinpipe.codec(spec, kernels=kernels) for kernels in ("auto", "reference"))
    assert torch.equal(ours.encode(x), literal.encode(x))


def test_positions_cost_a_bit_or_an_int32():
    assert thinpipe.codec("topk:0.1").wire_bytes((32_000,), torch.float32) == 4 * 3200 + 4000
    assert thinpipe.codec("topk:0.01").wire_bytes((32_000,), torch.float32) == 8 * 320


@pytest.mark.parametrize("spec", ["topk:0.1", "topk:0.01"])
def test_a_damaged_wire_decodes_alike_everywhere(spec):
    ours, literal = (thinpipe.codec(spec, kernels=kernels) for kernels in ("auto", "reference"))
    wire = torch.randint(0, 256, (ours.wire_bytes((50_000,), torch.float32),), dtype=torch.uint8)
    kept = ours.kept(50_000)
    wire[: 4 * kept] = torch.randn(kept).view(torch.uint8)
    out, expected = torch.empty(50_000), torch.empty(50_000)
    assert torch.equal(ours.decode(wire, out), literal.decode(wire, expected))


@pytest.mark.parametrize(("fraction", "count", "kept"), [(0.1, 16, 2), (0.1, 14, 1), (0.5, 3, 2), (0.001, 10, 1)])
def test_the_fraction_is_rounded_and_never_to_nothing(fraction, count, kept):
    assert TopK(fraction).kept(count) == kept
