"""Line styles of plots: a codec has the same colour in all of them.

The first part of a name that is in the table determines its style: ``sort:6+2``, ``pipeline linear sort:8`` and
``sort/tile`` are all orange. Other names are assigned one by a hash. Lines of one plot that share a colour differ in
marker and dashes, in the alphabetical order of their names.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

# The Okabe-Ito palette and Tol's bright one, which are distinguishable with colour blindness.
_COLOURS = {
    "uniform": "#0072B2",
    "sort": "#D55E00",
    "tile": "#009E73",
    "kmeans": "#CC79A7",
    "fast": "#E69F00",
    "gauss": "#882255",
    "topk": "#56B4E9",
    "power": "#B8A800",
    "svd": "#44AA99",
    "axes": "#332288",
    "delta": "#117733",  # of records up to version 0.3
    "recipe": "#EE3377",
    "none": "#000000",
    "fp16": "#777777",
    "bf16": "#AAAAAA",
    "nf4": "#994F00",
    "int8-blockwise": "#D35FB7",
    "8bit": "#4477AA",
    "4bit": "#228833",
    "3bit": "#CCBB44",
    "2bit": "#EE6677",
    "1bit": "#AA3377",
    "data-parallel": "#66CCEE",
    "process": "#999999",
    "latency": "#BBBBBB",
    "ddp": "#0072B2",
}
_MARKERS = "osD^vPX*<"
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class LineStyle:
    """The style of a line; open markers are larger and drawn below others, since lines may coincide."""

    colour: str
    marker: str
    dashes: str
    is_open: bool


def line_styles(names: Iterable[str]) -> dict[str, LineStyle]:
    """Return a style for each line of one plot; the colour depends on the name alone."""
    places = {name: _place(name) for name in sorted(set(names))}
    colours = list(_COLOURS.values())
    found: dict[str, LineStyle] = {}
    for name, place in places.items():
        same = sum(style.colour == colours[place] for style in found.values())
        found[name] = LineStyle(
            colour=colours[place],
            marker=_MARKERS[(place + same) % len(_MARKERS)],
            dashes=_DASHES[same % len(_DASHES)],
            is_open=(place + same) % 2 == 0,
        )
    return found


def _place(name: str) -> int:
    """Return the line of the table that a name belongs to."""
    known = list(_COLOURS)
    for word in re.findall(r"[\w-]+", name):
        if word in _COLOURS:
            return known.index(word)
    return zlib.crc32(name.encode()) % len(known)
