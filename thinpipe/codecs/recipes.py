"""Named pairs of codecs, one for activations and one for gradients: what to take if one does not want to choose.

docs/few-bits.md has the measurements they are chosen by. Scales are local: a global one loses the gradients of all
samples but the few largest. Gradients have a level at zero where there are enough levels: not of four. Activations at 2
bits want their four levels where the values are.
"""

from __future__ import annotations

from thinpipe.codecs.base import Codec
from thinpipe.codecs.spec import codec

RECIPES: dict[str, tuple[str, str]] = {  # of activations, of gradients
    "8bit": ("tile:8", "tile:8+zero"),
    "4bit": ("tile:4", "tile:4+zero"),
    "2bit": ("kmeans:2", "tile:2/64"),
}
DEFAULT_RECIPE = "8bit"  # of a pipeline's links: a quarter of the bytes, and no accuracy


def directions(text: str) -> tuple[str, str]:
    """The specs of activations and of gradients that a recipe names; any other spec is both."""
    name = text.strip()
    if name.endswith("bit") and name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; there are: {', '.join(RECIPES)}")
    return RECIPES.get(name, (text, text))


def forward_codec(spec: str | Codec) -> Codec:
    """The codec of activations that a spec or a recipe names."""
    return codec(directions(spec)[0] if isinstance(spec, str) else spec)


def backward_codec(spec: str | Codec) -> Codec:
    """The codec of gradients that a spec or a recipe names."""
    return codec(directions(spec)[1] if isinstance(spec, str) else spec)


def recipe_of(forward: str, backward: str) -> str | None:
    """The name of the recipe that two specs are; None if they are none."""
    pair = (codec(forward), codec(backward))
    return next((name for name in RECIPES if (forward_codec(name), backward_codec(name)) == pair), None)
