"""Named pairs of codecs, one for activations and one for gradients: what to take if one does not want to choose.

A name is what is sent for a value, on average over both directions, all counted. docs/few-bits.md has the measurements
they are chosen by. Scales are local: a global one loses the gradients of all samples but the few largest. Activations
bear less than gradients do, and get more of the bits; below 4 along axes that are learned. Gradients of few bits are
unbiased: what is lost of them evens out over the steps.
"""

from __future__ import annotations

from thinpipe.codecs.base import Codec
from thinpipe.codecs.spec import codec, needs_link

RECIPES: dict[str, tuple[str, str]] = {  # of activations, of gradients
    "8bit": ("tile:8", "tile:8+zero"),
    "4bit": ("gauss:5+coded", "gauss:3.35+coded+unbiased"),
    "3bit": ("axes:4", "gauss:2+unbiased"),
    "2bit": ("axes:2.5", "gauss:2+unbiased"),
    "1bit": ("axes:1.9", "gauss:1+unbiased"),
}
DEFAULT_RECIPE = "8bit"  # of a pipeline's links: a quarter of the bytes, and no accuracy


def directions(text: str) -> tuple[str, str]:
    """The specs of activations and of gradients that a recipe names; any other spec is both."""
    name = text.strip()
    if name.endswith("bit") and name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; there are: {', '.join(RECIPES)}")
    return RECIPES.get(name, (text, text))


def recipe_of(forward: str, backward: str) -> str | None:
    """The name of the recipe that two specs are; None if they are none."""
    pair = _in_full(forward), _in_full(backward)
    return next((name for name, specs in RECIPES.items() if tuple(map(_in_full, specs)) == pair), None)


def codecs_of(text: str) -> list[Codec]:
    """The codec that a spec names, or those of a recipe's two that need no link."""
    is_recipe = text.strip() in RECIPES
    return [codec(spec) for spec in dict.fromkeys(directions(text)) if not (is_recipe and needs_link(spec))]


def _in_full(spec: str) -> str:
    return spec.strip() if needs_link(spec) else codec(spec).spec
