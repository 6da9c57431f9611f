"""Checks of the kernels of a device against the reference implementations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.codecs import codec
from thinpipe.codecs.buckets import Buckets
from thinpipe.codecs.recipes import RECIPES
from thinpipe.lab.bench.codecs.codec_columns import relative_squared_error
from thinpipe.lab.bench.codecs.synthetic import Case
from thinpipe.lab.records.record import Check

LEVEL_BITS = 6
SPLITS = range(5)
ROUNDINGS = 1.0
# The kernels of kmeans cluster a sample of large tensors, the reference all values, by Lloyd's algorithm from evenly
# spaced values: with more bits that ends in a local minimum, so sort and uniform are the better limits.
KMEANS_LIMIT, LLOYD_BITS = 1.01, 4
_RECIPES = tuple(dict.fromkeys(spec for pair in RECIPES.values() for spec in pair))
TILES = (*(spec for spec in _RECIPES if spec.startswith("tile:")), "tile:4", "tile:2/64")
GAUSS = (*(spec for spec in _RECIPES if spec.startswith("gauss:")), "gauss:3.35+coded+unbiased", "gauss:4")

NOTE = "FAIL: a broken promise.\nulp: distance of the bucket's largest value to the next float32."


def verify_codecs(cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    """Yield a check per guarantee, each as soon as it is done. The reference implementations take minutes.

    Tensors with NaN or infinity are skipped: the guarantees are for finite values. Guarantees that do not depend on the
    device, such as sizes, are left to the tests.
    """
    cases = [case for case in cases if bool(case.load().isfinite().all())]
    contents = {case.content: [other for other in cases if other.content == case.content] for case in cases}
    for verify in (_buckets, _kmeans, _exact):
        for content, tensors in contents.items():
            yield from verify(content, tensors, device)


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


def _kmeans(content: str, cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    worst = _Worst()
    for case in cases:
        x = case.load().to(device)
        for bits in range(1, 9):
            error = _error(f"kmeans:{bits}", x)
            for family in ("sort", "uniform", *(["kmeans"] if bits <= LLOYD_BITS else [])):
                rival = _error(f"{family}:{bits}", x, "reference")
                worst.add(_over(error, rival), f"kmeans:{bits} and {family} on {case.shape_text}")
    yield worst.check(f"kmeans:1..8, {content}: error / the algorithm's, sort's or uniform's", KMEANS_LIMIT)


def _exact(content: str, cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    for specs in (TILES, GAUSS):
        different = _Worst()
        for case in cases:
            x = case.load().to(device)
            for spec in specs:
                apart = codec(spec).encode(x) != codec(spec, kernels="reference").encode(x)
                different.add(int(apart.sum()), f"{spec} on {case.shape_text}")
        yield different.check(f"{specs[0]}..{specs[-1]}, {content}: bytes unlike the algorithm's", 0)


def _error(spec: str, x: Tensor, kernels: str = "auto") -> float | None:
    each = codec(spec, kernels=kernels)
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
