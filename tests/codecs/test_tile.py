"""Tiles: the same bytes from both kernels, the format word by word, errors of half a step, options that keep theirs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinpipe
from tests.codecs.helpers import TILES, content, round_trip
from thinpipe.codecs import rounding_key
from thinpipe.codecs.kernels.reference import hadamard

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
MAX = torch.finfo(torch.float32).max
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def values(kind: str, count: int, seed: int = 0) -> torch.Tensor:
    normal = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    made = {
        "normal": lambda: normal,
        "relu": lambda: normal.clamp(min=0),
        "sparse": lambda: torch.where(normal > 1.5, normal, 0),
        "offset": lambda: normal * 0.01 + 100,
        "negative": lambda: -normal.abs() - 1,
        "zeros": lambda: torch.zeros(count),
        "negative zeros": lambda: torch.full((count,), -0.0),
        "both zeros": lambda: torch.where(normal > 0, 0.0, -0.0),
        "subnormal": lambda: normal * 1e-40,
        "gradients of a mean": lambda: normal * 1e-9,
        "huge": lambda: normal.clamp(-1, 1) * 3.4e38,
        "both ends": lambda: normal.sign() * MAX,
        "lowest": lambda: torch.full((count,), -MAX),
        "highest": lambda: torch.full((count,), MAX),
        "one NaN": lambda: normal.index_fill(0, torch.tensor([count // 2]), torch.nan),
        "one infinity": lambda: normal.index_fill(0, torch.tensor([count - 1]), -torch.inf),
    }
    return made[kind]()


KINDS = [
    "normal",
    "relu",
    "sparse",
    "offset",
    "negative",
    "zeros",
    "negative zeros",
    "both zeros",
    "subnormal",
    "gradients of a mean",
    "huge",
    "both ends",
    "lowest",
    "highest",
    "one NaN",
    "one infinity",
]
# Every size of tile with every choice of options; bits in turn, which change but the packing and the topmost level.
ALL = [
    f"tile:{2 + (i + 3 * j) % 7 if '+zero' in options else 1 + (i + 3 * j + more) % 8}{tile}{options}"
    for i, tile in enumerate(("", "/16", "/4096"))
    for j, options in enumerate(("", "+rot", "+sr", "+zero", "+rot+sr", "+sr+zero"))
    for more in ((0,) if "+zero" in options else (0, 4))
]


def steps_of(spec: str, x: torch.Tensor) -> torch.Tensor:
    """The step of every value's tile, from the wire."""
    codec = thinpipe.codec(spec)
    tiles = -(-x.numel() // codec.tile)
    steps = codec.encode(x)[: 2 * tiles].clone().view(torch.bfloat16).double()
    return steps.repeat_interleave(codec.tile)[: x.numel()].view(x.shape)


def agree(spec: str, x: torch.Tensor, key: int) -> None:
    """Both kernels write the same wire, and read the same from it."""
    fast, literal = thinpipe.codec(spec), thinpipe.codec(spec, kernels="reference")
    wire = fast.encode(x, key=key)
    assert torch.equal(wire, literal.encode(x, key=key))
    ours, right = (each.decode(wire, torch.full_like(x, 7)) for each in (fast, literal))
    assert torch.equal(ours.isnan(), right.isnan())
    bits = BITS[x.dtype]
    assert torch.equal(ours.nan_to_num(nan=0).view(bits), right.nan_to_num(nan=0).view(bits))


@pytest.mark.parametrize("spec", ALL)
def test_both_kernels_make_the_same_bytes(spec):
    for count in (1, 300, 9001):
        for kind in KINDS:
            agree(spec, values(kind, count), key=0x123456789ABCDEF0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("spec", TILES)
def test_both_kernels_agree_on_every_float_type(spec, dtype):
    for kind in KINDS:
        agree(spec, values(kind, 5000).to(dtype), key=7)


@pytest.mark.parametrize("spec", TILES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 6000),
    exponent=st.integers(-45, 37),
    spread=st.integers(0, 20),
    key=st.integers(0, 2**64 - 1),
)
def test_both_kernels_agree_at_every_scale(spec, seed, count, exponent, spread, key):
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (exponent + spread * torch.rand(count, generator=generator, dtype=torch.float64))
    agree(spec, (torch.randn(count, generator=generator, dtype=torch.float64) * scale).clamp(-MAX, MAX).float(), key)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_wire_byte_by_byte(kernels):
    """Two tiles of 16, the second one short: steps, lows, then codes."""
    x = torch.cat([torch.arange(16.0), torch.tensor([-1.0, 0.0, 0.5, 2.0])])
    wire = thinpipe.codec("tile:4/16", kernels=kernels).encode(x)
    # (2 - -1) / 15 = 0.2 is between two bfloat16, 0.19921875 and 0.2001953125: the larger one, 0x3e4d.
    assert wire[:4].tolist() == [0x80, 0x3F, 0x4D, 0x3E]
    assert wire[4:8].tolist() == [0x00, 0x00, 0x80, 0xBF]
    # 20 codes 0 1 ... 15 0 5 7 15 in 8 pieces of 3, the last ones short; row g has pieces g and g + 4.
    assert bytes(wire[8:].tolist()).hex() == "c0d1e2f3045576f708090a0b"


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_wire_with_zero_byte_by_byte(kernels):
    """-1 to 2 in 15 steps: zero is code 5, a step is 0.2 rounded up."""
    x = torch.tensor([-1.0, 0.0, 0.5, 2.0])
    wire = thinpipe.codec("tile:4+zero", kernels=kernels).encode(x)
    assert wire[:4].tolist() == [0x4D, 0x3E, 5, 0]
    assert wire[4:].tolist() == [0, 5, 7, 15]


@pytest.mark.parametrize("kind", ["normal", "relu", "offset", "negative", "subnormal", "gradients of a mean", "huge"])
@pytest.mark.parametrize("options", ["", "+zero", "/16", "/4096", "/64+zero"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_value_is_off_by_half_a_step(bits, options, kind):
    spec = f"tile:{bits}{options}"
    x = values(kind, 9001)
    off = (round_trip(spec, x).double() - x.double()).abs()
    rounding = x.double().abs() * 2.0**-22  # of the float32 operations between
    # What lies beyond the largest bfloat16 has no level, only the one before it.
    share = 1.0 if kind == "huge" else 0.5
    assert (off <= share * steps_of(spec, x) * (1 + 1e-4) + rounding).all()


@pytest.mark.parametrize("spec", ["tile:2", "tile:4/16", "tile:8", "tile:3+zero", "tile:4+sr", "tile:4+sr+zero"])
@pytest.mark.parametrize("kind", ["huge", "both ends", "lowest", "highest"])
def test_near_the_largest_floats_values_stay_finite_and_within_a_step(spec, kind):
    x = values(kind, 3000)
    out = round_trip(spec, x)
    assert out.isfinite().all()
    # A tile of one value has no step; its value is a bfloat16.
    allowed = torch.maximum(steps_of(spec, x) * (1 + 1e-4), x.double().abs() * 2.0**-7)
    assert ((out.double() - x.double()).abs() <= allowed).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.25, 1e-40, 65504.0, -3e38, 1e-9])
@pytest.mark.parametrize("spec", ["tile:1", "tile:4", "tile:2/16+zero", "tile:4+sr"])
def test_constants_are_near_and_bfloat16_ones_exact(spec, value):
    x = torch.full((50, 41), value)
    out = round_trip(spec, x)
    assert ((out - x).abs() <= x.abs() * 2.0**-7 + 2.0**-126).all()
    if "+zero" not in spec and torch.equal(x.bfloat16().float(), x):
        assert torch.equal(out, x)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("spec", ["tile:4/64", "tile:4/64+zero", "tile:4/64+rot", "tile:4/64+sr"])
def test_non_finite_values_affect_only_their_tile(spec, bad):
    x = torch.randn(640)
    x[200] = bad
    expected = torch.zeros(10, 64, dtype=torch.bool)
    expected[3] = True
    assert torch.equal(round_trip(spec, x).isnan(), expected.view(-1))


@pytest.mark.parametrize("spec", ["tile:2+zero", "tile:4+zero", "tile:8/16+zero", "tile:2+sr+zero", "tile:8+sr+zero"])
@pytest.mark.parametrize("kind", ["normal", "sparse", "negative", "offset", "subnormal", "huge"])
def test_zeros_stay_zeros(spec, kind):
    x = values(kind, 200_000)
    x[::3] = 0.0
    x[1::7] = -0.0
    codec = thinpipe.codec(spec)
    out = codec.decode(codec.encode(x, key=99), torch.empty_like(x))
    assert out[x == 0].eq(0).all()
    assert not torch.equal(out, x)


def test_without_the_option_zeros_of_gradients_are_lost():
    """Zeros of gradients decode to zero."""
    x = content("laplace", (64, 1024))
    x[:, ::2] = 0
    assert round_trip("tile:4", x)[x == 0].ne(0).any()
    assert round_trip("tile:4+zero", x)[x == 0].eq(0).all()


@pytest.mark.parametrize("spec", ["tile:1+sr", "tile:2+sr", "tile:4/16+sr", "tile:3+sr+zero", "tile:2/64+rot+sr"])
def test_stochastic_rounding_has_no_bias(spec):
    """The mean over keys is the value, within 4 standard errors of the mean of all values and nearly all of each."""
    x = torch.randn(2000, generator=torch.Generator().manual_seed(3))
    codec = thinpipe.codec(spec)
    out = torch.empty_like(x)
    keys = [rounding_key(number) for number in range(400)]
    drawn = torch.stack([codec.decode(codec.encode(x, key=key), out).double() - x.double() for key in keys])
    error = drawn.std(0) / 400**0.5
    moved = error > 0
    assert moved.float().mean() > 0.9
    deviations = drawn.mean(0)[moved] / error[moved]
    assert (deviations.abs() > 4).float().mean() < 0.002
    means = drawn.mean(1)
    assert abs(means.mean()) < 4 * means.std() / 400**0.5


@pytest.mark.parametrize("spec", ["tile:2", "tile:1", "tile:2+zero"])
def test_rounding_to_the_nearest_has_one(spec):
    """Without +sr a value at a third between two levels is always rounded to the lower one."""
    x = torch.tensor([0.0, 3.0, -1.5, *[1 / 3] * 253])
    assert abs((round_trip(spec, x) - x)[3:].mean()) > 0.1


def test_keys_change_only_the_rounding():
    x = torch.randn(100, 100)
    for spec in TILES:
        codec = thinpipe.codec(spec)
        wires = [codec.encode(x, key=key) for key in (0, 1, 1 << 32, 0)]
        assert torch.equal(wires[0], wires[3])
        header = 4 * -(-x.numel() // codec.tile)
        assert all(torch.equal(wire[:header], wires[0][:header]) for wire in wires)
        assert all(torch.equal(wire, wires[0]) is not codec.sr for wire in wires[1:3])


def test_stochastic_rounding_selects_one_of_two_neighbours():
    x = torch.randn(5000)
    for spec in ("tile:3+sr", "tile:3+sr+zero"):
        off = (round_trip(spec, x).double() - x.double()).abs()
        assert (off <= steps_of(spec, x) * (1 + 1e-4)).all()
        assert (off > steps_of(spec, x) * 0.6).any()


@pytest.mark.parametrize("tile", [16, 64, 128, 256, 4096])
def test_the_rotation_is_the_hadamard_matrix(tile):
    matrix = torch.ones(1, 1)
    while len(matrix) < tile:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    rows = torch.randn(3, tile)
    torch.testing.assert_close(hadamard(rows), rows @ matrix / tile**0.5, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(rows)), rows, rtol=1e-4, atol=1e-5)


def test_rotation_spreads_outliers():
    x = torch.randn(64, 256)
    x[:, 17] *= 50

    def error(spec):
        return (round_trip(spec, x) - x).square().mean().item()

    assert error("tile:4+rot") < 0.5 * error("tile:4")


def test_rotated_tiles_are_sent_in_full():
    for count in (1, 64, 65, 1000):
        tiles = -(-count // 64)
        assert thinpipe.codec("tile:4/64").wire_bytes((count,), torch.float32) == 4 * tiles + 4 * -(-count // 8)
        assert thinpipe.codec("tile:4/64+rot").wire_bytes((count,), torch.float32) == 4 * tiles + 32 * tiles


def test_smaller_tiles_err_less_and_cost_more():
    x = content("laplace", (64, 4096))
    specs = ["tile:4/4096", "tile:4", "tile:4/16"]
    errors = [(round_trip(spec, x) - x).square().mean().item() for spec in specs]
    sizes = [thinpipe.codec(spec).wire_bytes(x.shape, x.dtype) for spec in specs]
    assert errors == sorted(errors, reverse=True)
    assert sizes == sorted(sizes)
