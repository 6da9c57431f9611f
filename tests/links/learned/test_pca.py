"""Axes from moments: the same wherever they are found, of values of any size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.links.learned.test_transform import correlated, error, round_trip
from thinpipe.links.learned import pca
from thinpipe.links.learned.learner import BasisLearner, BasisUpdate, sender_projection
from thinpipe.links.learned.row_layout import Rows
from thinpipe.links.learned.transform import Basis

ROWS = Rows(torch.Size((1024, 96)), 2, 48)


def update_of(x: Tensor, bits: float = 3) -> BasisUpdate:
    learner = BasisLearner({}, ROWS, bits)
    learner.add(ROWS.columns(x))
    learner.fold()
    learner.start()
    return learner.take()


def lost(x: Tensor, found: BasisUpdate, bits: float = 3) -> float:
    return error(round_trip(x, ROWS, Basis.read(found.encoded, ROWS, bits, found.projection), bits), x)


def batch(kind: str, seed: int = 0) -> Tensor:
    x = correlated((1024, 96), seed)
    if kind == "uneven":
        x[:, 7] *= 1e4
    return x


@pytest.mark.parametrize("kind", ["even", "uneven"])
def test_a_sender_finds_the_same_again_and_on_any_number_of_cores(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, projection = update_of(batch(kind))
    assert torch.equal(sender_projection(encoded, ROWS), projection)
    for cores in (1, 64):
        monkeypatch.setattr(pca, "POOL", ThreadPoolExecutor(max(1, cores // 4)))
        assert all(map(torch.equal, update_of(batch(kind)), (encoded, projection)))


@pytest.mark.parametrize("scale", [1e-9, 1e16])
def test_the_error_is_proportional_to_values(scale: float) -> None:
    errors = []
    for times in (1.0, scale):
        x = times * (batch("even") - batch("even").mean(0))
        errors.append(lost(x, update_of(x)))
    assert errors[1] == pytest.approx(errors[0], rel=0.01)


@pytest.mark.parametrize("size", [1e-44, 1.0, 3e38])
@pytest.mark.parametrize("kind", ["one for all", "each for itself", "half of them none", "below zero", "not symmetric"])
def test_axes_of_moments_that_rounding_has_left_nothing_of(kind: str, size: float) -> None:
    draw = np.random.default_rng(0)
    products = {
        "one for all": np.ones((2, 48, 48)),
        "each for itself": np.stack([np.eye(48)] * 2),
        "half of them none": np.stack([np.diag(np.arange(48) % 2)] * 2),
        "below zero": -np.ones((2, 48, 48)),
        "not symmetric": draw.uniform(-1, 1, (2, 48, 48)),
    }[kind]
    origin = np.zeros((2, 48, 1), np.float32)
    encoded, projection = pca.learn_basis(
        (size * products).astype(np.float32), origin, float(np.float32(0.2)), 1024, ROWS, 3
    )
    basis = Basis.read(torch.from_numpy(encoded), ROWS, 3, torch.from_numpy(projection))
    assert np.isfinite(projection).all()
    assert int(basis.bits.sum()) == 3 * 96
    has_bits = (basis.bits > 0).view(2, 1, 48).double()
    torch.testing.assert_close(
        torch.from_numpy(projection).double() @ basis.reconstruction.double() * has_bits,
        torch.eye(48).double().expand(2, -1, -1) * has_bits,
        rtol=0,
        atol=1e-4,
    )
