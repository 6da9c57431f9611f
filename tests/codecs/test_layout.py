"""The packed codes: every width, every remainder, the worked example, the ratios."""

import pytest
import torch

import thinpipe
from thinpipe.codecs.layout import BLOCK, bucket_affine, bucket_values, pack, packed_bytes, planes, unpack


def test_the_worked_example():
    wire = torch.empty(4, dtype=torch.uint8)
    pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), wire, 4)
    assert wire.tolist() == [0x51, 0x62, 0x73, 0x84]


WIDTHS = range(1, 17)


def test_planes_cover_each_bit_once():
    for bits in WIDTHS:
        covered = [bit for width, shift in planes(bits) for bit in range(shift, shift + width)]
        assert covered == list(range(bits)), bits


@pytest.mark.parametrize("count", [1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 100])
def test_packing_is_undone_by_unpacking(count):
    for bits in WIDTHS:
        codes = torch.randint(0, 1 << bits, (count,))
        wire = torch.empty(packed_bytes(count, bits), dtype=torch.uint8)
        pack(codes, wire, bits)
        assert torch.equal(unpack(wire, count, bits), codes), bits


@pytest.mark.parametrize("count", [1, 9, BLOCK, 3 * BLOCK + 100, 50 * BLOCK + 3])
def test_the_cpu_packs_as_the_reference_does(count):
    x = torch.randn(count)
    for bits in WIDTHS:
        codec, literal = thinpipe.codec(f"uniform:{bits}"), thinpipe.codec(f"uniform:{bits}", kernels="reference")
        wire = codec.encode(x)
        assert torch.equal(wire, literal.encode(x)), bits
        assert torch.equal(codec.decode(wire, torch.empty(count)), literal.decode(wire, torch.empty(count))), bits


@pytest.mark.parametrize(
    ("name", "bits"),
    [(name, bits) for name in ("uniform", "sort", "fast") for bits in (16, 12, 8, 4, 2, 1)]
    + [("kmeans", bits) for bits in (8, 4, 2, 1)],
)
def test_ratios_count_everything_and_are_met_within_a_hundredth(name, bits):
    codec = thinpipe.codec(f"{name}:{bits}")
    for count in (2**18, 2**18 + 1, 12_845_056):  # 1 MB of float32 and more
        ratio = codec.wire_bytes((count,), torch.float32) / (4 * count)
        assert ratio == pytest.approx(bits / 32, rel=0.01)


def test_both_ends_of_a_bucket_are_exact():
    """Also where one is so small next to the other that their difference does not contain it."""
    values = bucket_values(torch.tensor([-1e30, 1e-30]), torch.tensor([1.0, 1e30]), 2).view(2, 4)
    assert values[0, 0] == torch.tensor(-1e30)
    assert values[0, 3] == 1
    assert torch.equal(values[1, [0, 3]], torch.tensor([1e-30, 1e30]))


@pytest.mark.parametrize("levels", [1, 3, 65535])
def test_buckets_of_every_span_are_scaled_by_normal_floats(levels):
    """Hardware that flushes smaller numbers to zero agrees with the rest, and no span overflows."""
    half = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    for lo, hi in ((-half, half), (torch.zeros_like(half), half)):
        p, offset, scale = bucket_affine(lo, hi, levels)
        assert (scale >= torch.finfo(torch.float32).tiny).all()
        assert ((hi * p - offset) * scale == levels).all()
