"""Presets: named pairs of codecs, one for activations and one for gradients.

The name is the number of bits sent per value, headers included, averaged over both directions. docs/few-bits.md has the
measurements behind the choice. Scales are local: a global scale loses the gradients of all samples but the few
largest. Activations tolerate less error than gradients and get more of the bits; below 4 bits in a learned PCA basis.
Gradients of few bits are unbiased: their errors average out over the steps.
"""

from __future__ import annotations

from thinpipe.codecs.base import Codec
from thinpipe.codecs.spec import FAMILIES, codec, needs_link

RECIPES: dict[str, tuple[str, str]] = {  # of activations, of gradients
    "8bit": ("tile:8", "tile:8+zero"),
    "4bit": ("gauss:5+coded", "gauss:3.35+coded+unbiased"),
    "3bit": ("axes:4", "gauss:2+unbiased"),
    "2bit": ("axes:2.5", "gauss:2+unbiased"),
    "1bit": ("axes:1.9", "gauss:1+unbiased"),
}
DEFAULT_RECIPE = "8bit"  # of a pipeline's links: a quarter of the bytes, no loss of accuracy
ADAPTIVE, ADAPTIVE_RANGE, FOR_GRADIENTS = "auto", "auto:2-8", "+gradients"  # see links/learned/adaptive_codec.py


def directions(text: str) -> tuple[str, str]:
    """Return the specs for activations and gradients of a preset; any other spec is used for both."""
    name = text.strip()
    if is_adaptive(name):
        spec = ADAPTIVE_RANGE if name == ADAPTIVE else name
        return spec, spec if spec.endswith(FOR_GRADIENTS) else spec + FOR_GRADIENTS
    if name.endswith("bit") and name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; there are: {', '.join(RECIPES)}")
    return RECIPES.get(name, (text, text))


def is_adaptive(spec: str) -> bool:
    """Return True if the number of bits is chosen in training, from the measured rates of links."""
    return spec.strip().partition(":")[0] == ADAPTIVE


def recipe_of(forward: str, backward: str) -> str | None:
    """Return the name of the preset with these two specs, or None."""
    pair = _in_full(forward), _in_full(backward)
    return next((name for name, specs in RECIPES.items() if tuple(map(_in_full, specs)) == pair), None)


def codecs_of(text: str) -> list[Codec]:
    """Return the codec that a spec names, or those of a preset's two codecs that need no link."""
    is_recipe = text.strip() in RECIPES
    return [codec(spec) for spec in dict.fromkeys(directions(text)) if not (is_recipe and needs_link(spec))]


def _in_full(spec: str) -> str:
    """Return the canonical spec; one that is in no preset unchanged: it may be a record's, and must import nothing."""
    name = spec.strip().partition(":")[0]
    return codec(spec).spec if name in FAMILIES else spec.strip()
