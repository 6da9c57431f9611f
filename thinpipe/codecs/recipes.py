"""Named pairs of codecs, one for activations and one for gradients: what to take if one does not want to choose.

docs/few-bits.md has the measurements they are chosen by. Scales are local: a global one loses the gradients of all
samples but the few largest. Gradients have a level at zero where there are enough levels: not of four. Activations at 2
bits want their four levels where the values are.
"""

from __future__ import annotations

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


def recipe_of(forward: str, backward: str) -> str | None:
    """The name of the recipe that two specs are; None if they are none."""
    try:
        pair = codec(forward), codec(backward)
    except ValueError:  # delta(...) is no codec, and in no recipe
        return None
    return next((name for name, specs in RECIPES.items() if tuple(map(codec, specs)) == pair), None)
