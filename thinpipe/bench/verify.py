"""What the codecs promise, held against the literal algorithms, scikit-learn and a stopwatch."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from thinpipe.bench.contents import Case
from thinpipe.bench.losses import relative_squared_error
from thinpipe.codecs import codec
from thinpipe.codecs.buckets import Buckets
from thinpipe.measure.record import Check

LEVEL_BITS = 6
SPLITS = range(5)
ROUNDINGS = 1.0
SKLEARN_VALUES = 24 * 56 * 56  # one sample of the smallest default shape: seconds for scikit-learn, not minutes
SKLEARN_BITS = range(1, 5)
SKLEARN_LIMIT = 1.01
RATIO_BYTES = 1_000_000  # below this a header may be more than 1%
IMPORT_LIMIT_S = 0.3
IMPORT_RUNS = 5

NOTE = (
    "FAIL: a broken promise. MISS: a target that depends on the machine.\n"
    "ulp: distance of the bucket's largest value to the next float32.\n"
    f"scikit-learn: KMeans, 10 starts, converged, on {SKLEARN_VALUES} values."
)

_IMPORT_PROBE = """
import os, sys, time, torch
threads = lambda: len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
before, start = threads(), time.perf_counter()
import thinpipe
print(time.perf_counter() - start, threads() - before)
"""


def verify_codecs(cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    """Every promise as a check, as each is done. The literal algorithms make this a matter of minutes.

    Tensors with NaN or infinity are left out: the promises are about numbers.
    """
    cases = [case for case in cases if bool(case.load().isfinite().all())]
    contents = {case.content: [other for other in cases if other.content == case.content] for case in cases}
    for content, tensors in contents.items():
        for family, algorithm in (("sort", 1), ("fast", 2)):
            yield from _buckets_against_algorithm(family, algorithm, content, tensors, device)
    for content, tensors in contents.items():
        smallest = min(tensors, key=lambda case: case.count)
        if smallest.count >= 1 << SKLEARN_BITS[-1]:  # scikit-learn wants a value for each cluster
            yield _kmeans_against_sklearn(content, smallest.load().reshape(-1)[:SKLEARN_VALUES].to(device))
    for content, tensors in contents.items():
        yield _kmeans_against_uniform_and_sort(content, tensors, device)
    yield from _wire_ratios([case for case in cases if 4 * case.count >= RATIO_BYTES])
    yield from _import_cost()


def roundings_apart(decoded: Tensor, right: Tensor, mins: Tensor, steps: Tensor, levels: int) -> float:
    """The largest difference between two decoded tensors, in float32 roundings of the bucket it lies in.

    One rounding (ulp) is the distance from the largest magnitude of the bucket to the next float32: what
    min + level * step can be off by when it is computed in another order. With one bucket from 0 to 6,
    one rounding is 2^-21.
    """
    largest = torch.maximum(mins.abs(), (mins + levels * steps).abs())
    ulp = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 24)
    ulp = ulp.clamp(min=torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps)
    bucket = torch.bucketize(right.float(), mins[1:].contiguous(), right=True)
    return ((decoded.float() - right.float()).abs() / ulp[bucket]).max().item()


def _buckets_against_algorithm(
    family: str, algorithm: int, content: str, cases: Sequence[Case], device: torch.device
) -> Iterator[Check]:
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


def _kmeans_against_sklearn(content: str, values: Tensor) -> Check:
    from sklearn.cluster import KMeans

    worst = _Worst()
    points = values.double().cpu().numpy()[:, None]
    for bits in SKLEARN_BITS:
        best = KMeans(1 << bits, n_init=10, max_iter=1000, tol=1e-6, random_state=0).fit(points)
        spec = f"kmeans:{bits}"
        error = relative_squared_error(values, _round_trip(spec, values))
        worst.add(_over(error, best.inertia_ / float((points**2).sum())), spec)
    return worst.check(f"kmeans:1..4, {content}: error / scikit-learn's", SKLEARN_LIMIT)


def _kmeans_against_uniform_and_sort(content: str, cases: Sequence[Case], device: torch.device) -> Check:
    worst = _Worst()
    for case in cases:
        x = case.load().to(device)
        for bits in range(5, 9):
            error = relative_squared_error(x, _round_trip(f"kmeans:{bits}", x))
            for rival in (f"sort:{bits}", f"uniform:{bits}"):
                rival_error = relative_squared_error(x, _round_trip(rival, x))
                worst.add(_over(error, rival_error), f"kmeans:{bits} and {rival} on {case.shape_text}")
    return worst.check(f"kmeans:5..8, {content}: error / sort's or uniform's", 1)


def _wire_ratios(cases: Sequence[Case]) -> Iterator[Check]:
    for bits in (16, 12, 8, 4):
        worst = _Worst()
        for case in cases:
            for family in ("uniform", "sort", "fast", *(["kmeans"] if bits <= 8 else [])):
                ratio = codec(f"{family}:{bits}").wire_bytes(case.shape, torch.float32) / (4 * case.count)
                worst.add(100 * abs(ratio / (bits / 32) - 1), f"{family}:{bits} on {case.shape_text}")
        if cases:
            yield worst.check(f"{bits} bits, from 1 MB on: wire, off {bits / 32:g}", 1, "%")


def _import_cost() -> Iterator[Check]:
    runs = [
        subprocess.run([sys.executable, "-c", _IMPORT_PROBE], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(IMPORT_RUNS)
    ]
    seconds, threads = median(float(run[0]) for run in runs), max(int(run[1]) for run in runs)
    yield Check(
        claim="import thinpipe, beyond torch",
        measured=seconds,
        limit=IMPORT_LIMIT_S,
        unit=" s",
        required=False,
    )
    yield Check(claim="import thinpipe: threads started", measured=threads, limit=0)


def _round_trip(spec: str, x: Tensor) -> Tensor:
    each = codec(spec)
    return each.decode(each.encode(x), torch.empty_like(x))


def _over(error: float | None, other: float | None) -> float:
    """error / other, where nothing over nothing is even."""
    if error is None or other is None:
        return math.nan
    if other == 0:
        return 1.0 if error == 0 else math.inf
    return error / other


@dataclass
class _Worst:
    """The largest of several figures, and where it was."""

    figure: float | None = None
    where: str = ""

    def add(self, figure: float, where: str) -> None:
        # NaN is the worst there can be, and stays: nothing compares as larger.
        if self.figure is None or math.isnan(figure) or figure > self.figure:
            self.figure, self.where = figure, where

    def check(self, claim: str, limit: float, unit: str = "") -> Check:
        return Check(claim=claim, measured=self.figure, limit=limit, unit=unit, detail=self.where)
