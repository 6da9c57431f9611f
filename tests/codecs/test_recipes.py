"""Presets: a name for the codec of activations and the codec of gradients."""

from __future__ import annotations

import pytest
import torch

import thinpipe
from thinpipe.codecs.recipes import RECIPES, codecs_of, directions, recipe_of
from thinpipe.lab.bench.inputs import parse_codecs


@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_names_two_codecs(name: str) -> None:
    forward, backward = directions(name)
    assert forward != backward
    assert recipe_of(forward, backward) == name


@pytest.mark.parametrize("name", RECIPES)
def test_zero_gradients_stay_zero(name: str) -> None:
    """A sample with small gradients keeps them next to one with large gradients."""
    used = thinpipe.codec(directions(name)[1])
    x = torch.randn(8, 256) * torch.tensor([1.0, 0, 1e-4, 0, 1, 0, 1e-4, 0])[:, None]
    found = used.decode(used.encode(x), torch.empty_like(x))
    assert (found[1::2] == 0).all()
    most = 0.8 if name == "1bit" else 0.6  # unbiased quantization to one bit loses 0.57 of the energy
    assert ((found - x)[::2].norm(dim=1) < most * x[::2].norm(dim=1)).all()


def test_a_codec_spec_applies_to_both_directions() -> None:
    assert directions("sort:8") == ("sort:8", "sort:8")
    assert recipe_of("sort:8", "sort:8") is None
    assert recipe_of("axes:8", "tile:8+zero") is None


def test_a_preset_may_contain_a_codec_that_needs_a_link() -> None:
    assert directions("2bit") == ("axes:2.5", "gauss:2+unbiased")
    assert codecs_of("2bit") == [thinpipe.codec("gauss:2+unbiased")]  # usable without a link
    assert codecs_of("tile:4") == [thinpipe.codec("tile:4")]


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(ValueError, match="there is no recipe '5bit'; there are: 8bit, 4bit, 3bit, 2bit, 1bit"):
        directions("5bit")


@pytest.mark.parametrize(
    ("name", "bits"), [("8bit", 8.125), ("4bit", 4.27), ("3bit", 3.15), ("2bit", 2.36), ("1bit", 1.55)]
)
def test_bits_per_value_of_both_directions(name: str, bits: float) -> None:
    """The PCA basis is included, averaged over steps."""
    shape = torch.Size((2, 32, 64, 64))
    both = parse_codecs(name, baselines=True)
    sent = sum(used.wire_bytes(shape, torch.float32) for used in both)
    assert 8 * sent / len(both) / shape.numel() == pytest.approx(bits, abs=0.005)


@pytest.mark.parametrize("bits", [16, 12, 8, 4])
@pytest.mark.parametrize("family", ["uniform", "sort", "fast", "kmeans"])
def test_headers_are_less_than_a_hundredth_from_one_megabyte_on(family: str, bits: int) -> None:
    if family != "kmeans" or bits <= 8:
        wire_bytes = thinpipe.codec(f"{family}:{bits}").wire_bytes(torch.Size((262_144,)), torch.float32)
        assert wire_bytes == pytest.approx(262_144 * bits / 8, rel=0.01)
