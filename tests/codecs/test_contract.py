"""The guarantees of every codec, for every family, dtype and shape."""

import copy
import pickle
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinpipe
from tests.codecs.helpers import GAUSS, QUANTIZERS, SPECS, TILES, round_trip

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SHAPES = [(), (1,), (7,), (2048,), (2049,), (3, 5, 11), (4, 40, 60), (2, 3, 64, 64)]
BAD = [float("nan"), float("inf"), float("-inf")]


def in_turn(specs, others, third):
    """Every spec with every one of the others, and the third kind of thing in turn: each spec meets all of them."""
    crossed = product(enumerate(specs), enumerate(others))
    return [(spec, other, third[(i + j) % len(third)]) for (i, spec), (j, other) in crossed]


@pytest.mark.parametrize(("spec", "shape", "dtype"), in_turn(SPECS, SHAPES, FLOATS), ids=str)
def test_one_buffer_of_the_promised_size(spec, shape, dtype):
    codec = thinpipe.codec(spec)
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    before = x.clone()
    wire = codec.encode(x)
    assert (wire.dtype, wire.dim(), wire.device) == (torch.uint8, 1, x.device)
    assert wire.numel() == codec.wire_bytes(shape, dtype) == codec.wire_bytes(list(shape), dtype)
    assert torch.equal(x, before)
    into = torch.full_like(wire, 0xA5)
    assert codec.encode(x, out=into) is into
    assert torch.equal(into, wire)
    out = torch.full(shape, 12345.0, dtype=dtype)
    assert codec.decode(wire, out) is out
    assert out.isfinite().all()
    # No value may be further off than the range of the tensor: nothing was left unwritten.
    span = 2 * x.double().abs().max().item()
    assert (out.double() - x.double()).abs().max().item() <= span * 1.01


@pytest.mark.parametrize(
    ("spec", "in_dtype", "out_dtype"),
    [("none", *pair) for pair in product(FLOATS, FLOATS)]  # the only one whose wire depends on the type
    + [(spec, FLOATS[i - 1], FLOATS[i]) for spec in SPECS if spec != "none" for i in range(4)],
    ids=str,
)
def test_decodes_into_any_float_type(spec, in_dtype, out_dtype):
    x = torch.randn(40, 60, dtype=torch.float64).to(in_dtype)
    same = round_trip(spec, x)
    other = round_trip(spec, x, dtype=out_dtype)
    # Either may have been rounded once more than the other, by the coarser of the two types.
    coarse = max(torch.finfo(in_dtype).eps, torch.finfo(out_dtype).eps)
    torch.testing.assert_close(other.double(), same.double(), rtol=1.01 * coarse, atol=1e-6)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in ("none", "topk:1")])
def test_lossy_codecs_lose_something_and_are_smaller(spec):
    x = torch.randn(64, 96)
    assert not torch.equal(round_trip(spec, x), x)
    assert thinpipe.codec(spec).wire_bytes(x.shape, x.dtype) < x.numel() * x.itemsize


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_none_loses_nothing(dtype):
    x = torch.randn(1001, dtype=torch.float64).to(dtype)
    assert torch.equal(round_trip("none", x), x)


# What Codec itself does, whatever the family: each spec stands for all.


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("none", torch.int64),
        ("sort:6+2", torch.int32),
        ("tile:4", torch.uint8),
        ("topk:0.1", torch.bool),
        ("power:2", torch.complex64),
        ("fp16", torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_everything_but_floats_travels_raw(spec, dtype):
    x = torch.randint(0, 2, (3, 50)).to(dtype)
    codec = thinpipe.codec(spec)
    wire = codec.encode(x)
    assert wire.numel() == x.numel() * x.itemsize
    out = torch.zeros(x.shape, dtype=dtype)
    assert torch.equal(codec.decode(wire, out).view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize(("spec", "shape"), [("tile:4", (0,)), ("svd:2", (3, 0, 5))], ids=str)
def test_empty_tensors_take_no_bytes(spec, shape):
    codec = thinpipe.codec(spec)
    wire = codec.encode(torch.empty(shape))
    assert wire.numel() == codec.wire_bytes(shape, torch.float32) == 0
    assert codec.decode(wire, torch.empty(shape)).shape == shape


@pytest.mark.parametrize("spec", SPECS)
def test_strides_do_not_matter(spec):
    x = torch.randn(3, 4, 12, 16)
    for view in (
        x.transpose(1, 2),
        x[:, ::2],
        x.to(memory_format=torch.channels_last),
        x.flip(0),
        x[:1].expand(5, -1, -1, -1),
    ):
        codec = thinpipe.codec(spec)
        assert torch.equal(codec.encode(view), codec.encode(view.contiguous()))


@pytest.mark.parametrize("spec", ["none", "power:2"])
def test_gradients_do_not_leak_through(spec):
    x = torch.randn(8, 16, requires_grad=True)
    codec = thinpipe.codec(spec)
    out = torch.zeros(8, 16, requires_grad=True)
    assert not codec.encode(x).requires_grad
    assert codec.decode(codec.encode(x), out).grad_fn is None


@pytest.mark.parametrize("spec", ["none", "topk:1", *QUANTIZERS])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.25, 1e-40, 65504.0, -3e38])
def test_constant_tensors_come_back_exactly(spec, value):
    x = torch.full((50, 41), value)
    assert torch.equal(round_trip(spec, x), x)


@pytest.mark.parametrize(("spec", "bad", "dtype"), in_turn(SPECS, BAD, FLOATS), ids=str)
def test_non_finite_values_are_not_hidden(spec, bad, dtype):
    for shape in [(1, 1), (40, 60), (300, 100)]:
        x = torch.randn(shape, dtype=torch.float64).to(dtype)
        x[0, 0] = bad
        assert not round_trip(spec, x).isfinite().all()


@pytest.mark.parametrize("spec", [*QUANTIZERS, *TILES, *GAUSS])
def test_float64_beyond_float32_is_not_hidden(spec):
    assert not round_trip(spec, torch.tensor([1e300, 0.0, 1.0], dtype=torch.float64)).isfinite().any()


@pytest.mark.parametrize("spec", ["none", "sort:6+2"])
def test_wrong_sizes_are_errors_with_both_sizes(spec):
    codec = thinpipe.codec(spec)
    x = torch.randn(40, 60)
    wire = codec.encode(x)
    for wrong in (wire[:-1], wire[:0], torch.cat([wire, wire[:1]])):
        with pytest.raises(ValueError, match=rf"(?s){codec.spec.split(':')[0]}.*{wire.numel()}.*got {wrong.numel()}"):
            codec.decode(wrong, torch.empty(40, 60))
        with pytest.raises(ValueError, match=rf"{wire.numel()} bytes, got {wrong.numel()}"):
            codec.encode(x, out=wrong.clone())


def test_keys_have_64_bits():
    codec = thinpipe.codec("tile:2/64+sr")
    x = torch.randn(40, 60)
    codec.encode(x, key=2**64 - 1)
    for key in (-1, 2**64):
        with pytest.raises(ValueError, match=f"64 bits.*got {key}"):
            codec.encode(x, key=key)


def test_buffers_of_the_wrong_kind_are_errors():
    codec = thinpipe.codec("uniform:8")
    x = torch.randn(64)
    wire = codec.encode(x)
    with pytest.raises(ValueError, match="1-D uint8"):
        codec.decode(wire.float(), torch.empty(64))
    with pytest.raises(ValueError, match="1-D uint8"):
        codec.decode(wire.view(2, -1), torch.empty(64))
    with pytest.raises(ValueError, match="1-D uint8"):
        codec.encode(x, out=torch.empty(2 * wire.numel(), dtype=torch.uint8)[::2])
    with pytest.raises(ValueError, match="contiguous"):
        codec.decode(wire, torch.empty(8, 8).t())
    with pytest.raises(ValueError, match="dense"):
        codec.encode(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="share a device"):
        codec.decode(wire, torch.empty(64, device="meta"))


@pytest.mark.parametrize("spec", SPECS)
def test_a_wire_may_lie_anywhere_in_a_larger_buffer(spec):
    """A link that puts several wires into one message hands out slices that start at any byte."""
    codec = thinpipe.codec(spec)
    x = torch.randn(40, 60)
    wire = codec.encode(x)
    large = torch.zeros(wire.numel() + 8, dtype=torch.uint8)
    for start in (1, 2, 3, 4):
        part = large[start : start + wire.numel()]
        codec.encode(x, out=part)
        assert torch.equal(part, wire)
        assert torch.equal(codec.decode(part, torch.empty(40, 60)), codec.decode(wire, torch.empty(40, 60)))
        assert large[:start].eq(0).all()
        large.zero_()


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 5000), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(FLOATS))
def test_noise_fills_the_tensor_and_nothing_else(spec, count, seed, dtype):
    codec = thinpipe.codec(spec)
    generator = torch.Generator().manual_seed(seed)
    size = codec.wire_bytes((count,), dtype)
    wire = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    guarded = torch.full((count + 64,), 7.0, dtype=dtype)
    decoded = codec.decode(wire, guarded[32:-32])
    assert guarded[:32].eq(7).all()
    assert guarded[-32:].eq(7).all()
    again = codec.decode(wire, torch.full((count,), 9.0, dtype=dtype))
    assert torch.equal(decoded.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize("spec", SPECS)
def test_codecs_are_values(spec):
    codec = thinpipe.codec(spec)
    assert codec == thinpipe.codec(codec.spec)
    assert codec == pickle.loads(pickle.dumps(codec)) == copy.deepcopy(codec)
    assert hash(codec) == hash(thinpipe.codec(codec.spec))
    assert str(codec) == codec.spec
