"""Recipes: a name for the codec of activations and the codec of gradients."""

from __future__ import annotations

import pytest
import torch

import thinpipe
from thinpipe.codecs.recipes import RECIPES, backward_codec, directions, forward_codec, recipe_of


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_two_codecs(name: str) -> None:
    forward, backward = directions(name)
    assert forward_codec(name) == thinpipe.codec(forward)
    assert backward_codec(name) == thinpipe.codec(backward)
    assert recipe_of(forward, backward) == name


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_bits_it_says(name: str) -> None:
    bits = int(name.removesuffix("bit"))
    for used in (forward_codec(name), backward_codec(name)):
        per_value = 8 * used.wire_bytes((1 << 20,), torch.float32) / (1 << 20)
        assert bits <= per_value <= bits + 0.5  # with what every tile's scale takes


def test_gradients_have_a_zero() -> None:
    assert all("+zero" in backward_codec(name).spec for name in RECIPES)


def test_any_other_spec_is_both() -> None:
    assert directions("sort:8") == ("sort:8", "sort:8")
    assert recipe_of("sort:8", "sort:8") is None
    made = thinpipe.codec("uniform:8")
    assert forward_codec(made) is made


def test_what_is_neither_names_what_there_is() -> None:
    with pytest.raises(ValueError, match="there is no recipe '3bit'; there are: 8bit, 4bit, 2bit"):
        forward_codec("3bit")
