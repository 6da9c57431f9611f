"""Rotated blocks: the same bytes from both kernels, the wire word by word, and the error that was promised."""

import pytest
import torch

import thinpipe
from tests.codecs.helpers import GAUSS, content, round_trip
from thinpipe.codecs.gauss import channels_of
from thinpipe.codecs.kernels.reference import butterflies
from thinpipe.codecs.layout import gauss_signs
from thinpipe.codecs.normal import distortion, signed_levels

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# With means and without, of one channel, of few and many, of runs short and long, and with a remainder after units.
SHAPES = [
    (),
    (1,),
    (300,),
    (5000,),
    (9001, 1),
    (150, 448),
    (20, 128, 3),
    (130, 16, 5, 5),
    (9, 3, 70, 50),
    (2, 5, 2, 9, 9),
]


def normal(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(spec: str, x: torch.Tensor) -> float:
    return ((round_trip(spec, x) - x).square().sum() / x.square().sum()).item()


def agree(spec: str, x: torch.Tensor) -> None:
    """Both kernels write the same wire, and read the same from it."""
    fast, literal = thinpipe.codec(spec), thinpipe.codec(spec, kernels="reference")
    wire = fast.encode(x)
    assert torch.equal(wire, literal.encode(x))
    ours, right = (each.decode(wire, torch.full_like(x, 7)) for each in (fast, literal))
    assert torch.equal(ours.isnan(), right.isnan())
    assert torch.equal(
        ours.nan_to_num(nan=0).view(-1).view(torch.uint8), right.nan_to_num(nan=0).view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_kernels_make_the_same_bytes(shape):
    for i, spec in enumerate(
        [
            *GAUSS,
            "gauss:3/16",
            "gauss:5/4096",
            "gauss:6/32",
            "gauss:8/128",
            "gauss:2/2048",
            "gauss:1/32+unbiased",
            "gauss:8/4096+unbiased",
        ]
    ):
        agree(spec, (3 * normal(shape, i) + 5).to(FLOATS[i % 4]))


@pytest.mark.parametrize("spec", ["gauss:2", "gauss:4/64", "gauss:3+unbiased", "gauss:3.4+coded+unbiased"])
@pytest.mark.parametrize(
    "kind", ["zeros", "constant", "tiny", "below what has a scale", "large", "beyond it", "every scale", "NaN", "relu"]
)
def test_both_kernels_agree_on_odd_values(spec, kind):
    x = normal((300, 20))
    odd = {
        "zeros": lambda: torch.where(x > 0, 0.0, -0.0),
        "constant": lambda: torch.full((300, 20), 2.7),
        "tiny": lambda: x * 1e-28,
        "below what has a scale": lambda: x * 1e-33,
        "large": lambda: x * 1e33,
        "beyond it": lambda: x * 1e38,
        "every scale": lambda: x * torch.logspace(-45, 38, 6000).view(300, 20),
        "NaN": lambda: x.index_put((torch.tensor([7, 200]),), torch.tensor(torch.nan)),
        "relu": lambda: x.clamp(min=0),
    }
    agree(spec, odd[kind]())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_wire_byte_by_byte(kernels):
    """One spike of 1 in a block of 16: every component is 1 or -1, and so is the scale times 16."""
    x = torch.zeros(16)
    x[0] = 1.0
    wire = thinpipe.codec("gauss:1/16", kernels=kernels).encode(x)
    assert wire[:16].tolist() == [0x80, 0x3D, *[0] * 14]  # 1/16, and padding
    assert wire[16:].tolist() == [0, 0]  # 16 positive components
    x[0] = -2.0
    wire = thinpipe.codec("gauss:4/16", kernels=kernels).encode(x)
    # 2 * 27307 / 65536 in 16ths is 0.0521, as a bfloat16 0x3d55; 2 over that is 2.404, above the last boundary, 2.401.
    assert wire[:16].tolist() == [0x55, 0x3D, *[0] * 14]
    assert wire[16:].tolist() == [0xFF] * 8  # a sign, and the last level


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("kind", ["normal", "outliers", "laplace", "smooth image", "rows of a model"])
def test_the_error_is_that_of_a_normal_distribution(bits, kind):
    """Whatever the values are; less where a block has few outliers, which are levels of their own."""
    smooth = torch.nn.functional.interpolate(normal((4, 8, 7, 7)), size=(56, 56), mode="bilinear")
    made = {
        "normal": lambda: normal((300, 512)),
        "outliers": lambda: content("outliers", (4, 64, 768)),
        "laplace": lambda: content("laplace", (50000,)),
        "smooth image": lambda: smooth - smooth.mean((0, 2, 3), keepdim=True),
        "rows of a model": lambda: normal((300, 512)) * torch.logspace(-3, 3, 300)[:, None],
    }
    assert relative_error(f"gauss:{bits}", made[kind]()) < 1.07 * distortion(bits)
    unbiased = distortion(bits) / (1 - distortion(bits))
    assert relative_error(f"gauss:{bits}+unbiased", made[kind]()) < 1.07 * unbiased


def test_means_of_channels_cost_nothing():
    x = normal((16, 64, 256))
    moved = x + 20 * normal((256,), 1)
    image = x.view(4, 16, 64, 64) + 20 * normal((16, 1, 1), 2)
    for each in (moved, image):
        lost = (round_trip("gauss:4", each) - each).square().mean()
        assert lost < 1.03 * distortion(4)


def test_means_are_sent_for_channels_with_many_values():
    assert [channels_of(torch.Size(shape)) for shape in [(), (1000,), (127, 8), (128, 8), (4, 32, 8), (4, 31, 8)]] == [
        *((0, 1), (0, 1), (0, 1), (8, 1), (8, 1), (0, 1))
    ]
    assert channels_of(torch.Size((2, 3, 8, 8))) == (3, 64)
    assert channels_of(torch.Size((2, 3, 2, 8, 8))) == (3, 128)
    codec = thinpipe.codec("gauss:4/64")
    assert codec.wire_bytes((127, 8), torch.float32) == 48 + 16 * 32  # 16 scales and the seed, padded
    assert codec.wire_bytes((128, 8), torch.float32) == 64 + 16 * 32


def test_a_mean_is_one_of_512_values():
    """Every other one of 1024 values is sampled: the rest does not change the mean that is sent."""
    x = normal((1024, 3))
    x[1::2] += 100
    means = thinpipe.codec("gauss:8").encode(x)[:6].clone().view(torch.bfloat16).float()
    torch.testing.assert_close(means, x[::2].mean(0), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("tile", [16, 256, 4096])
def test_signs_are_as_if_drawn_for_each_block(tile):
    signs = gauss_signs(400, tile)
    assert signs.mean().abs() < 5 / signs.numel() ** 0.5
    alike = (signs @ signs.T / tile).fill_diagonal_(0)
    assert alike.square().mean() < 1.2 / tile  # of any two blocks
    assert alike.mean().abs() < 0.1 / tile**0.5
    assert (gauss_signs(400, tile, seed=12345) * signs).mean().abs() < 5 / signs.numel() ** 0.5
    spectra = butterflies(signs) / tile**0.5  # of what is constant
    assert spectra.square().mean(0).sub(1).abs().max() < 6 * (2 / 400) ** 0.5  # any component as large as another


def test_no_two_messages_have_the_same_errors():
    """The next step's gradient is much like this one's: their errors must not be."""
    x, codec = normal((64, 256)), thinpipe.codec("gauss:2+unbiased")
    errors = [codec.decode(codec.encode(x, key=key), torch.empty_like(x)) - x for key in (1, 1, 2, 1 << 40)]
    assert torch.equal(errors[0], errors[1])
    for other in errors[2:]:
        alike = (errors[0] * other).sum() / errors[0].square().sum()
        assert abs(alike) < 0.05


@pytest.mark.parametrize("bits", ["1", "2", "3/64", "4", "2+coded"])
def test_unbiased_errors_average_out(bits):
    """One gradient of many samples, some with the other sign, is decoded with its magnitude."""
    row, spec, least = normal((256,)), f"gauss:{bits}+unbiased", f"gauss:{bits}"
    sizes = torch.linspace(0.5, 2, 200).view(-1, 1) * torch.tensor([[1.0], [-1.0]]).repeat(100, 1)
    x = sizes * row
    came = (round_trip(spec, x) * sizes).sum(0) / sizes.square().sum()
    single = relative_error(spec, x)
    assert (came - row).square().sum() / row.square().sum() < 0.03 * single
    assert came @ row / row.square().sum() == pytest.approx(1, abs=0.01)
    assert (round_trip(least, x) * x).sum() / x.square().sum() < 0.995
    assert relative_error(least, x) < single


def test_a_spike_is_exact_at_the_largest_sums():
    """Every component of its block is as large as the largest: four thousand of them at the last level."""
    x = torch.zeros(4096)
    x[5] = 1.9999
    for bits in (1, 3, 8):
        torch.testing.assert_close(round_trip(f"gauss:{bits}/4096+unbiased", x), x, rtol=0.005, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("spec", ["gauss:2/64", "gauss:4/64"])
def test_non_finite_values_affect_only_their_block(spec, bad):
    x = normal((160, 4))
    x[50, 1] = bad
    expected = torch.zeros(10, 64, dtype=torch.bool)
    expected[3] = True
    assert torch.equal(round_trip(spec, x).isnan(), expected.view(160, 4))


def test_zeros_and_constant_channels_come_back_exactly():
    for x in (torch.zeros(300), torch.full((200, 7), 0.75), torch.arange(3.0).view(3, 1, 1).expand(9, 3, 8, 8)):
        out = round_trip("gauss:2", x)
        assert torch.equal(out, x)
        assert not torch.signbit(out).any()


def test_codes_have_a_sign_and_a_magnitude():
    for bits in range(1, 9):
        chosen = signed_levels(bits)
        half = len(chosen) // 2
        assert chosen[half:] == tuple(-level for level in chosen[:half])
        assert list(chosen[:half]) == sorted(chosen[:half])
        assert chosen[0] > 0


def test_fewer_bytes_and_less_error_than_tiles_and_codebooks_for_unequal_channels():
    """Hidden states with means and outliers: rotated tiles and codebooks send as much and lose several times more."""
    x = content("outliers", (8, 128, 768)) + 3 * normal((768,), 1)
    for bits in (2, 4):
        ours = thinpipe.codec(f"gauss:{bits}")
        rivals = [f"tile:{bits}+rot", f"tile:{bits}", f"tile:{bits}/64", f"kmeans:{bits}"]
        assert ours.wire_bytes(x.shape, x.dtype) < 1.04 * min(
            thinpipe.codec(rival).wire_bytes(x.shape, x.dtype) for rival in rivals
        )
        assert 3 * relative_error(ours.spec, x) < min(relative_error(rival, x) for rival in rivals)
