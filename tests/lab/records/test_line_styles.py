"""A codec has one colour in all plots; lines of one plot are distinguishable."""

from __future__ import annotations

import pytest

from thinpipe.codecs import FAMILIES
from thinpipe.codecs.recipes import RECIPES
from thinpipe.lab.records.line_styles import _COLOURS, line_styles


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("uniform", "uniform"),
        ("sort:6+2", "sort"),
        ("sort+zero", "sort"),
        ("pipeline linear gpipe 8 chunks sort:6+2", "sort"),
        ("kmeans/sort", "kmeans"),
        ("delta(sort,first=fp16)/sort", "delta"),
        ("none, torch's stage", "none"),
        ("3 workers, 8bit", "8bit"),
        ("int8-blockwise", "int8-blockwise"),
        ("data-parallel", "data-parallel"),
        ("single process", "process"),
    ],
)
def test_the_colour_follows_from_the_name_alone(name: str, word: str) -> None:
    others = ["tile", "uniform:4", "own.module:Codec", "recipe"]
    for names in ([name], [name, *others], [*reversed(others), name]):
        assert line_styles(names)[name].colour == _COLOURS[word]


def test_every_codec_has_a_colour_of_its_own() -> None:
    names = [*FAMILIES, *RECIPES, "axes", "delta", "recipe"]
    assert not set(names) - set(_COLOURS)
    assert len({_COLOURS[word] for word in names}) == len(names)


def test_other_names_always_have_the_same_colour() -> None:
    assert line_styles(["own.module:Codec"])["own.module:Codec"].colour == "#882255"


def test_lines_of_one_colour_differ_whatever_their_order() -> None:
    names = ["tile", "tile+rot", "tile+sr", "tile+zero", "tile/tile"]
    styles = line_styles(names)
    assert len({style.colour for style in styles.values()}) == 1
    assert len({style.marker for style in styles.values()}) == len(names)
    assert len({style.dashes for style in styles.values()}) == 4
    assert line_styles(reversed(names)) == styles


def test_codecs_of_a_benchmark_differ_in_more_than_their_colour() -> None:
    """Who cannot see colours sees markers and dashes; of nearly equal colours none have the same."""
    near = [("uniform", "8bit"), ("tile", "4bit"), ("gauss", "1bit"), ("fp16", "bf16"), ("sort", "fast")]
    for pair in near:
        one, other = line_styles(pair).values()
        assert one.marker != other.marker
