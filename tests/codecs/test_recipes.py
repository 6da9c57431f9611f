"""Recipes: a name for the codec of activations and the codec of gradients."""

from __future__ import annotations

import pytest
import torch

import thinpipe
from thinpipe.codecs.recipes import RECIPES, codecs_of, directions, recipe_of


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_two_codecs(name: str) -> None:
    forward, backward = directions(name)
    assert forward != backward
    assert recipe_of(forward, backward) == name


@pytest.mark.parametrize("name", RECIPES)
def test_where_a_sample_has_no_gradient_none_arrives(name: str) -> None:
    """And a sample with a small one keeps it next to one with a large one."""
    used = thinpipe.codec(directions(name)[1])
    x = torch.randn(8, 256) * torch.tensor([1.0, 0, 1e-4, 0, 1, 0, 1e-4, 0])[:, None]
    found = used.decode(used.encode(x), torch.empty_like(x))
    assert (found[1::2] == 0).all()
    most = 0.8 if name == "1bit" else 0.6  # of what is unbiased at one bit 0.57 is lost, squared
    assert ((found - x)[::2].norm(dim=1) < most * x[::2].norm(dim=1)).all()


def test_any_other_spec_is_both() -> None:
    assert directions("sort:8") == ("sort:8", "sort:8")
    assert recipe_of("sort:8", "sort:8") is None
    assert recipe_of("delta(tile:8)", "tile:8+zero") is None


def test_a_recipe_may_hold_what_needs_a_link() -> None:
    assert directions("2bit") == ("axes:2.5", "gauss:2+unbiased")
    assert codecs_of("2bit") == [thinpipe.codec("gauss:2+unbiased")]  # for who has no link
    assert codecs_of("tile:4") == [thinpipe.codec("tile:4")]


def test_what_is_neither_names_what_there_is() -> None:
    with pytest.raises(ValueError, match="there is no recipe '5bit'; there are: 8bit, 4bit, 3bit, 2bit, 1bit"):
        directions("5bit")
