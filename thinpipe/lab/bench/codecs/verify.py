"""Checks of the codecs' promises: against the reference implementations, scikit-learn, and their nominal sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.codecs import codec
from thinpipe.codecs.base import as_dtype
from thinpipe.codecs.buckets import Buckets
from thinpipe.codecs.recipes import RECIPES
from thinpipe.codecs.tile import Tile
from thinpipe.lab.bench.codecs.codec_columns import relative_squared_error
from thinpipe.lab.bench.codecs.synthetic import Case
from thinpipe.lab.bench.inputs import parse_codecs
from thinpipe.lab.records.record import Check

LEVEL_BITS = 6
SPLITS = range(5)
ROUNDINGS = 1.0
SKLEARN_VALUES = 24 * 56 * 56  # one sample of the smallest default shape: scikit-learn takes seconds, not minutes
SKLEARN_BITS = range(1, 5)
SKLEARN_LIMIT = 1.01
RATIO_BYTES = 1_000_000  # below this a header may be more than 1%
_RECIPES = tuple(dict.fromkeys(spec for pair in RECIPES.values() for spec in pair))
TILES = (*(spec for spec in _RECIPES if spec.startswith("tile:")), "tile:4", "tile:2/64")
GAUSS = (*(spec for spec in _RECIPES if spec.startswith("gauss:")), "gauss:3.35+coded+unbiased", "gauss:4")
HALF_A_STEP = 0.5 + 1e-3  # with float32 rounding of (x - low) / step, which is at most 255
RECIPE_BITS_MORE = 0.6  # above the preset's name, which rounds down: headers, PCA basis, and a short last tile

NOTE = (
    "FAIL: a broken promise.\n"
    "ulp: distance of the bucket's largest value to the next float32.\n"
    f"scikit-learn: KMeans, 10 starts, converged, on {SKLEARN_VALUES} values."
)


def verify_codecs(cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    """Yield a check per guarantee, each as soon as it is done. The reference implementations take minutes.

    Tensors with NaN or infinity are skipped: the guarantees are for finite values.
    """
    cases = [case for case in cases if bool(case.load().isfinite().all())]
    contents = {case.content: [other for other in cases if other.content == case.content] for case in cases}
    for verify in (_buckets, _kmeans_and_sklearn, _kmeans_and_others, _tiles, _gauss):
        for content, tensors in contents.items():
            yield from verify(content, tensors, device)
    yield from _wire_ratios([case for case in cases if 4 * case.count >= RATIO_BYTES])


def roundings_apart(decoded: Tensor, right: Tensor, mins: Tensor, steps: Tensor, levels: int) -> float:
    """Return the largest difference between two decoded tensors, in ulp of the bucket it lies in.

    One ulp is the distance from the bucket's largest magnitude to the next float32: the rounding error of min + level *
    step when it is computed in another order. For one bucket from 0 to 6 it is 2^-21.
    """
    largest = torch.maximum(mins.abs(), (mins + levels * steps).abs())
    ulp = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 24)
    ulp = ulp.clamp(min=torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps)
    bucket = torch.bucketize(right.float(), mins[1:].contiguous(), right=True)
    return ((decoded.float() - right.float()).abs() / ulp[bucket]).max().item()


def _buckets(content: str, cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    for algorithm, family in enumerate(("sort", "fast"), 1):
        different, roundings = _Worst(), _Worst()
        for case in cases:
            x = case.load().to(device)
            for split_bits in SPLITS:
                spec = f"{family}:{LEVEL_BITS}+{split_bits}"
                ours, literal = codec(spec), codec(spec, kernels="reference")
                assert isinstance(ours, Buckets)
                wire, right_wire = ours.encode(x), literal.encode(x)
                mins, steps = ours.mins_and_steps(wire)
                right_mins, right_steps = ours.mins_and_steps(right_wire)
                decoded, right = ours.decode(wire, torch.empty_like(x)), literal.decode(right_wire, torch.empty_like(x))
                apart = roundings_apart(decoded, right, right_mins, right_steps, (1 << LEVEL_BITS) - 1)
                where = f"{spec} on {case.shape_text}"
                different.add(int((mins != right_mins).sum() + (steps != right_steps).sum()), where)
                roundings.add(apart, where)
        claim = f"{family}:{LEVEL_BITS}+0..{SPLITS[-1]}, {content}"
        yield different.check(f"{claim}: mins, steps unlike Algorithm {algorithm}", 0)
        yield roundings.check(f"{claim}: decoded, off Algorithm {algorithm}", ROUNDINGS, " ulp")


def _kmeans_and_sklearn(content: str, cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    from sklearn.cluster import KMeans

    smallest = min(cases, key=lambda case: case.count)
    if smallest.count < 1 << SKLEARN_BITS[-1]:  # scikit-learn needs at least one value per cluster
        return
    values, worst = smallest.load().reshape(-1)[:SKLEARN_VALUES].to(device), _Worst()
    points = values.double().cpu().numpy()[:, None]
    for bits in SKLEARN_BITS:
        best = KMeans(1 << bits, n_init=10, max_iter=1000, tol=1e-6, random_state=0).fit(points)
        error = _round_trip_error(f"kmeans:{bits}", values)
        worst.add(_over(error, best.inertia_ / float((points**2).sum())), f"kmeans:{bits}")
    yield worst.check(f"kmeans:1..4, {content}: error / scikit-learn's", SKLEARN_LIMIT)


def _kmeans_and_others(content: str, cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    worst = _Worst()
    for case in cases:
        x = case.load().to(device)
        for bits in range(5, 9):
            error = _round_trip_error(f"kmeans:{bits}", x)
            for rival in (f"sort:{bits}", f"uniform:{bits}"):
                worst.add(_over(error, _round_trip_error(rival, x)), f"kmeans:{bits} and {rival} on {case.shape_text}")
    yield worst.check(f"kmeans:5..8, {content}: error / sort's or uniform's", 1)


def _tiles(content: str, cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    """Check that bytes equal the reference implementation's and that errors are at most half a step."""
    different, steps = _Worst(), _Worst()
    for case in cases:
        x = case.load().to(device)
        for spec in TILES:
            ours, where = codec(spec), f"{spec} on {case.shape_text}"
            assert isinstance(ours, Tile)
            wire = ours.encode(x)
            different.add(_bytes_apart(spec, x), where)
            steps.add(steps_apart(ours, wire, x, ours.decode(wire, torch.empty_like(x))), where)
    claim = f"{TILES[0]}..{TILES[-1]}, {content}"
    yield different.check(f"{claim}: bytes unlike the algorithm's", 0)
    yield steps.check(f"{claim}: decoded, off", HALF_A_STEP, " steps")


def _gauss(content: str, cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    different = _Worst()
    for case in cases:
        for spec in GAUSS:
            different.add(_bytes_apart(spec, case.load().to(device)), f"{spec} on {case.shape_text}")
    yield different.check(f"{GAUSS[0]}..{GAUSS[-1]}, {content}: bytes unlike the algorithm's", 0)


def _bytes_apart(spec: str, x: Tensor) -> int:
    """Return the number of bytes that differ from the reference implementation's."""
    return int((codec(spec).encode(x) != codec(spec, kernels="reference").encode(x)).sum())


def steps_apart(tile: Tile, wire: Tensor, x: Tensor, decoded: Tensor) -> float:
    """Return the largest error in steps of its tile, beyond one float32 rounding of the tile's largest value."""
    count = -(-x.numel() // tile.tile)
    steps = as_dtype(wire[: 2 * count].clone(), torch.bfloat16).double()
    values, errors = x.reshape(-1).double(), (decoded.double() - x.double()).abs().reshape(-1)
    missing = count * tile.tile - x.numel()
    values, errors = (torch.nn.functional.pad(each, (0, missing)).view(count, -1) for each in (values, errors))
    rounding = values.abs().amax(1) * torch.finfo(torch.float32).eps
    beyond = (errors.amax(1) - rounding).clamp(min=0)
    # With a step of 0 all values of the tile are equal: any error is too large.
    return torch.where(beyond > 0, beyond / steps, beyond).max().item()


def _wire_ratios(cases: Sequence[Case]) -> Iterator[Check]:
    for bits in (16, 12, 8, 4):
        worst = _Worst()
        for case in cases:
            for family in ("uniform", "sort", "fast", *(["kmeans"] if bits <= 8 else [])):
                ratio = codec(f"{family}:{bits}").wire_bytes(case.shape, torch.float32) / (4 * case.count)
                worst.add(100 * abs(ratio / (bits / 32) - 1), f"{family}:{bits} on {case.shape_text}")
        if cases:
            yield worst.check(f"{bits} bits, from 1 MB on: wire, off {bits / 32:g}", 1, "%")
    for recipe in RECIPES:
        worst, both = _Worst(), parse_codecs(recipe, baselines=True)
        for case in cases:
            sent = sum(used.wire_bytes(case.shape, torch.float32) for used in both)
            worst.add(8 * sent / len(both) / case.count, case.shape_text)
        if cases:
            most = int(recipe.removesuffix("bit")) + RECIPE_BITS_MORE
            yield worst.check(f"{recipe}, from 1 MB on: sent for a value, both directions", most, " bits")


def _round_trip_error(spec: str, x: Tensor) -> float | None:
    each = codec(spec)
    return relative_squared_error(x, each.decode(each.encode(x), torch.empty_like(x)))


def _over(error: float | None, other: float | None) -> float:
    """Return error / other; 0 / 0 is 1."""
    if error is None or other is None:
        return math.nan
    if other == 0:
        return 1.0 if error == 0 else math.inf
    return error / other


@dataclass
class _Worst:
    """The maximum of several values, and where it occurred."""

    value: float | None = None
    where: str = ""

    def add(self, value: float, where: str) -> None:
        # NaN is the worst value and stays: no comparison with it is true.
        if self.value is None or math.isnan(value) or value > self.value:
            self.value, self.where = value, where

    def check(self, claim: str, limit: float, unit: str = "") -> Check:
        return Check(claim=claim, measured=self.value, limit=limit, unit=unit, detail=self.where)
