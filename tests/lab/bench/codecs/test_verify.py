"""The verification detects kernels that break a guarantee."""

import math

import pytest
import torch

from thinpipe.codecs import base
from thinpipe.codecs.kernels import reference
from thinpipe.lab.bench.codecs import verify
from thinpipe.lab.bench.codecs.synthetic import Case, made_cases
from thinpipe.lab.bench.codecs.verify import roundings_apart, verify_codecs

CPU = torch.device("cpu")


def run(shape=(2, 24, 7, 7), content="relu6"):
    return {check.claim: check for check in verify_codecs(made_cases([shape], [content]), CPU)}


def test_roundings_are_those_of_the_bucket():
    mins, steps = torch.tensor([0.0, 4.0]), torch.tensor([0.5, 1.0])  # buckets 0..1.5 and 4..7 at 3 levels
    right = torch.tensor([0.0, 1.0, 5.0])
    one_ulp_up = torch.nextafter(right, torch.tensor(math.inf))
    assert roundings_apart(right, right, mins, steps, 3) == 0
    # The rounding of a bucket is that of its largest value: 2^-23 up to 1.5, 2^-21 up to 7.
    assert roundings_apart(one_ulp_up, right, mins, steps, 3) == 1
    assert roundings_apart(right + torch.tensor([0, 2.0**-22, 0]), right, mins, steps, 3) == 2
    assert roundings_apart(right + torch.tensor([0, 0, 2.0**-20]), right, mins, steps, 3) == 2


@pytest.mark.parametrize("content", ["relu6", "outliers", "laplace"])
def test_every_promise_is_kept(content):
    checks = run(content=content)
    assert [check for check in checks.values() if check.required and not check.passed] == []
    assert [claim.partition(",")[0] for claim in checks] == [
        *("sort:6+0..4", "sort:6+0..4", "fast:6+0..4", "fast:6+0..4", "kmeans:1..8"),
        *("tile:8..tile:2/64", "gauss:5+coded..gauss:4"),
    ]


def test_tensors_that_hold_nan_or_next_to_nothing_are_no_obstacle():
    cases = [
        Case(content="nan", shape=(2,), load=lambda: torch.tensor([math.nan, 1.0])),
        Case(content="three", shape=(3,), load=lambda: torch.tensor([1.0, 2.0, 3.0])),
    ]
    checks = list(verify_codecs(cases, CPU))
    assert not any("nan" in check.claim for check in checks)
    assert sum("three" in check.claim for check in checks) == 7
    assert all(check.passed for check in checks if check.required)


def with_kernels(monkeypatch, name, broken):
    """Put a broken kernel where the fast ones are looked up; the literal ones stay."""
    module = type("Broken", (), {k: staticmethod(v) for k, v in vars(reference).items() if callable(v)})
    setattr(module, name, staticmethod(broken))
    select = base.select
    monkeypatch.setattr(base, "select", lambda kind, device: module if kind == "auto" else select(kind, device))


def test_wrong_buckets_are_caught(monkeypatch):
    def encode_sort(x, wire, level_bits, split_bits, zero):
        reference.encode_sort(x * 1.0001, wire, level_bits, split_bits)

    with_kernels(monkeypatch, "encode_sort", encode_sort)
    checks = run()
    broken = {claim for claim, check in checks.items() if claim.startswith("sort") and not check.passed}
    assert broken == {
        "sort:6+0..4, relu6: mins, steps unlike Algorithm 1",
        "sort:6+0..4, relu6: decoded, off Algorithm 1",
    }
    assert "on 2x24x7x7" in checks["sort:6+0..4, relu6: decoded, off Algorithm 1"].detail
    assert checks["fast:6+0..4, relu6: decoded, off Algorithm 2"].passed


def test_tiles_of_another_step_are_caught(monkeypatch):
    def encode_tile(x, *arguments):
        reference.encode_tile(x * 1.01, *arguments)

    with_kernels(monkeypatch, "encode_tile", encode_tile)
    tiles = [check for claim, check in run().items() if claim.startswith("tile")]
    assert [check.passed for check in tiles] == [False]


def test_a_codebook_that_is_not_the_best_is_caught(monkeypatch):
    with_kernels(monkeypatch, "encode_kmeans", lambda x, *arguments: reference.encode_kmeans(x * 1.1, *arguments))
    assert not run()["kmeans:1..8, relu6: error / the algorithm's, sort's or uniform's"].passed


def test_nan_is_never_a_pass():
    worst = verify._Worst()
    worst.add(math.nan, "here")
    worst.add(0.5, "there")
    assert worst.where == "here"
    assert not worst.check("claim", 1).passed
