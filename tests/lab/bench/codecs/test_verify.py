"""The verification catches codecs that break their promises."""

import math

import pytest
import torch

from thinpipe.codecs import base, codec
from thinpipe.codecs.kernels import reference
from thinpipe.lab.bench.codecs import verify
from thinpipe.lab.bench.codecs.synthetic import Case, made_cases
from thinpipe.lab.bench.codecs.verify import roundings_apart, steps_apart, verify_codecs

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
    assert len(checks) == 9
    assert [claim for claim in checks if claim.startswith("tile:8..tile:2/64")] == [
        f"tile:8..tile:2/64, {content}: bytes unlike the algorithm's",
        f"tile:8..tile:2/64, {content}: decoded, off",
    ]


def test_tensors_that_hold_nan_or_next_to_nothing_are_no_obstacle():
    cases = [
        Case(content="nan", shape=(2,), load=lambda: torch.tensor([math.nan, 1.0])),
        Case(content="three", shape=(3,), load=lambda: torch.tensor([1.0, 2.0, 3.0])),
    ]
    checks = list(verify_codecs(cases, CPU))
    assert not any("nan" in check.claim for check in checks)
    assert sum("three" in check.claim for check in checks) == 8
    assert all(check.passed for check in checks if check.required)


def test_ratios_are_checked_on_large_tensors():
    checks = list(verify._wire_ratios(made_cases([(2, 32, 64, 64)], ["relu6"])))
    bits, recipes = checks[:4], checks[4:]
    assert [check.claim.split()[0] for check in bits] == ["16", "12", "8", "4"]
    assert all(check.passed and 0 < check.measured < 1 for check in bits)
    assert {check.claim.split(",")[0]: round(check.measured, 2) for check in recipes} == {
        "8bit": 8.12,
        "4bit": 4.27,
        "3bit": 3.15,
        "2bit": 2.36,
        "1bit": 1.55,
    }
    assert all(check.passed for check in recipes)


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
    assert len(tiles) == 2
    assert not any(check.passed for check in tiles)


def test_errors_of_tiles_are_counted_in_their_steps():
    tile = codec("tile:8/16")
    x = torch.cat([torch.linspace(0, 255, 16), torch.linspace(0, 2550, 8)])  # steps of 1 and of 10
    wire = tile.encode(x)
    assert steps_apart(tile, wire, x, x) == 0
    off = x.clone()
    off[3] += 0.25
    off[20] += 1.0
    assert steps_apart(tile, wire, x, off) == pytest.approx(0.25, rel=0.01)
    assert steps_apart(tile, tile.encode(torch.ones(16)), torch.ones(16), torch.full((16,), 1.5)) == math.inf


def test_a_codebook_that_is_not_the_best_is_caught(monkeypatch):
    monkeypatch.setattr(reference, "LLOYD_STEPS", 1)
    with_kernels(monkeypatch, "encode_kmeans", reference.encode_kmeans)
    assert not run()["kmeans:1..4, relu6: error / scikit-learn's"].passed


def test_nan_is_never_a_pass():
    worst = verify._Worst()
    worst.add(math.nan, "here")
    worst.add(0.5, "there")
    assert worst.where == "here"
    assert not worst.check("claim", 1).passed
