"""The parser of codec specs: ``"sort:6+2"`` -> Codec, and back through ``Codec.spec``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from thinpipe.codecs.base import Codec, KernelCodec
from thinpipe.codecs.buckets import Buckets
from thinpipe.codecs.cast import Cast
from thinpipe.codecs.gauss import Gauss
from thinpipe.codecs.kernels import Kernels
from thinpipe.codecs.kmeans import KMeans
from thinpipe.codecs.lowrank import LowRank
from thinpipe.codecs.registry import Family, entry_points, external_family
from thinpipe.codecs.tile import DEFAULT_TILE, Tile
from thinpipe.codecs.topk import TopK
from thinpipe.options import nearest


def _integer(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not an integer")
    return int(text)


def _options(argument: str, allowed: Sequence[str]) -> tuple[str, set[str]]:
    """Split the options off an argument: ``"6+2+zero"`` is ``"6+2"`` and ``{"zero"}``. A number is not an option."""
    first, *parts = argument.split("+")
    options: set[str] = set()
    while parts and parts[-1].isalpha():
        option = parts.pop()
        if option not in allowed:
            raise ValueError(f"there is no option +{option} here, there are: +{', +'.join(allowed)}")
        if option in options:
            raise ValueError(f"+{option} is there twice")
        options.add(option)
    return "+".join([first, *parts]), options


def _nothing(codec: Codec) -> Callable[[str], Codec]:
    def parse(argument: str) -> Codec:
        if argument:
            raise ValueError(f"{argument!r} is one argument too many")
        return codec

    return parse


def _buckets(name: Literal["sort", "fast"], argument: str) -> Codec:
    argument, options = _options(argument, ["zero"])
    level_text, plus, split_text = argument.partition("+")
    if plus:
        return Buckets(name, _integer(level_text), _integer(split_text), "zero" in options)
    bits = _integer(argument)
    # Three level bits per split bit: 16 -> 12+4, 12 -> 9+3, 8 -> 6+2, 4 -> 3+1; 2 and 3 bits have one split bit.
    split = min(max(bits // 4, 1), bits - 1) if bits > 1 else 0
    return Buckets(name, bits - split, split, "zero" in options)


def _one_number(codec: Callable[[int, bool], Codec]) -> Callable[[str], Codec]:
    """Return a parser of a number of bits with an optional +zero."""

    def parse(argument: str) -> Codec:
        bits, options = _options(argument, ["zero"])
        return codec(_integer(bits), "zero" in options)

    return parse


def _tile(argument: str) -> Tile:
    size, options = _options(argument, ("rot", "sr", "zero"))
    bits, slash, tile = size.partition("/")
    return Tile(
        _integer(bits),
        _integer(tile) if slash else DEFAULT_TILE,
        rot="rot" in options,
        sr="sr" in options,
        zero="zero" in options,
    )


def _gauss(argument: str) -> Gauss:
    size, options = _options(argument, ("coded", "unbiased"))
    bits, slash, tile = size.partition("/")
    return Gauss(
        float(bits) if "coded" in options else _integer(bits),
        _integer(tile) if slash else DEFAULT_TILE,
        unbiased="unbiased" in options,
        coded="coded" in options,
    )


_TILE_RULE = (
    "the bits per value, from 1 to 8, and after a slash the values in a tile, a power of two from 16 to 4096; then "
    "+rot, +sr or +zero, of which +rot and +zero exclude each other and +zero needs 2 bits"
)

_BUCKETS_RULE = (
    "Q level bits and S split bits with Q from 1 to 16, S from 0 to 8 and Q+S at most 16, "
    "or the total B from 1 to 16, which is split 3:1; optionally followed by +zero"
)

FAMILIES: dict[str, Family] = {
    "none": Family(usage="none", rule="no argument", parse=_nothing(Cast("none"))),
    "fp16": Family(usage="fp16", rule="no argument", parse=_nothing(Cast("fp16"))),
    "bf16": Family(usage="bf16", rule="no argument", parse=_nothing(Cast("bf16"))),
    "uniform": Family(
        usage="uniform:8",
        rule="the bits per value, from 1 to 16, optionally followed by +zero",
        parse=_one_number(lambda bits, zero: Buckets("uniform", bits, 0, zero)),
    ),
    "sort": Family(usage="sort:6+2 or sort:8", rule=_BUCKETS_RULE, parse=partial(_buckets, "sort")),
    "fast": Family(usage="fast:6+2 or fast:8", rule=_BUCKETS_RULE, parse=partial(_buckets, "fast")),
    "kmeans": Family(
        usage="kmeans:4",
        rule="the bits per value, from 1 to 8, optionally followed by +zero",
        parse=_one_number(KMeans),
    ),
    "tile": Family(usage="tile:4 or tile:2/64+sr", rule=_TILE_RULE, parse=_tile),
    "gauss": Family(
        usage="gauss:4 or gauss:2/512",
        rule="the bits per value, from 1 to 8, and after a slash the values in a block, a power of two from 16 to "
        "4096; then +coded, with which bits may be a fraction, and +unbiased",
        parse=_gauss,
    ),
    "svd": Family(usage="svd:14", rule="the rank, 1 or more", parse=lambda a: LowRank("svd", _integer(a))),
    "power": Family(usage="power:14", rule="the rank, 1 or more", parse=lambda a: LowRank("power", _integer(a))),
    "topk": Family(
        usage="topk:0.1",
        rule="the fraction of values that travel, above 0 and at most 1",
        parse=lambda a: TopK(float(a)),
    ),
}


def codec(spec: str | Codec, *, kernels: str | Kernels = "auto") -> Codec:
    """Return the codec that a spec such as ``"sort:6+2"`` names.

    ``kernels="reference"`` runs the algorithms as defined, in plain torch: slow, and the reference for the fast
    kernels. A module of kernels runs on any device of the tensor.
    """
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"a codec spec is a string such as 'sort:6+2', got {type(spec).__name__}")
    name, _, argument = spec.strip().partition(":")
    if needs_link(spec):
        raise ValueError(
            f"{spec.strip()} learns from what a link carries and needs both of its ends: it is for the activations of "
            "a pipeline, PipelineStage(forward=...) or the forward codec of thinpipe train; here take gauss:2 or "
            "another codec"
        )
    family = FAMILIES.get(name)
    if family is None:
        try:
            external = external_family(spec.strip(), _taken())
        except ValueError as error:
            raise ValueError(f"{error}. There are: {_usages()}") from None
        if external is None:
            raise ValueError(_unknown(name, spec))
        family, argument = external
    try:
        parsed = family.parse(argument)
    except ValueError as error:
        raise ValueError(
            f"{spec!r} makes no sense: {error}; {name} takes {family.rule}, as in {family.usage}. "
            f"There are: {_usages()}"
        ) from None
    return replace(parsed, kernels=kernels) if isinstance(parsed, KernelCodec) else parsed


def needs_link(spec: str) -> bool:
    """Return True if a spec names a link codec with state, not a codec."""
    return spec.strip() == "auto" or spec.strip().startswith(("axes:", "auto:"))


def split_specs(text: str) -> list[str]:
    """Split a comma-separated list of specs."""
    return [spec.strip() for spec in text.split(",") if spec.strip()]


def _presets() -> dict[str, tuple[str, str]]:
    from thinpipe.codecs.recipes import RECIPES  # imported here: recipes imports this module

    return RECIPES


def _taken() -> tuple[str, ...]:
    """Return the names that other packages cannot register."""
    return *FAMILIES, *_presets(), "axes", "auto"


def _unknown(name: str, spec: str) -> str:
    presets = _presets()
    if spec.strip() in presets:
        forward, backward = presets[spec.strip()]
        return (
            f"{spec.strip()} is a preset of two codecs, {forward} for activations and {backward} for gradients; "
            "here take one codec"
        )
    inside = "" if spec.strip() == name else f" (in {spec!r})"
    guess = nearest(spec.strip(), [*presets, *_examples(), "axes:2"])
    return f"there is no codec {name!r}{inside}{guess}; presets: {', '.join(presets)}; codecs: {_usages()}"


def _examples() -> list[str]:
    return [*(family.usage.split(" or ")[0] for family in FAMILIES.values()), *entry_points(_taken())]


def _usages() -> str:
    return f"{', '.join(_examples())}, for activations over links axes:2, and your own as package.module:Class"
