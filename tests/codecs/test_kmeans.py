"""k-means: as good as a converged search, exact where it can be, stable where values are far apart."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from tests.codecs.helpers import content, round_trip, squared_error

CONTENTS = ["relu6", "outliers", "laplace"]


@pytest.mark.parametrize(
    ("bits", "kind"), [(1, "laplace"), (2, "outliers"), (3, "relu6"), (4, "relu6"), (4, "outliers"), (4, "laplace")]
)
def test_within_a_hundredth_of_the_best_of_ten_converged_runs(bits, kind):
    x = content(kind, (2, 24, 7, 7))
    # Scaled, since scikit-learn's stopping rule looks at absolute distances.
    points = (x.double() / x.double().std()).reshape(-1, 1).numpy()
    best = KMeans(1 << bits, n_init=10, tol=1e-9, max_iter=1000, random_state=0).fit(points).inertia_
    assert squared_error(f"kmeans:{bits}", x) <= 1.01 * best * x.double().var().item()


def gradient(kind: str, count: int) -> np.ndarray:
    """Most of the mass next to zero, most of the squared size far from it."""
    random = np.random.default_rng(0)
    if kind == "laplace":
        return random.laplace(size=count)
    if kind in ("t2", "t3"):
        return random.standard_t(int(kind[1]), size=count)
    if kind == "sparse":
        return np.where(random.random(count) < 0.95, 0, random.laplace(size=count))
    if kind == "clipped":
        return np.where(
            random.random(count) < 0.95, 1e-6 * random.normal(size=count), 2 * random.integers(0, 2, count) - 1
        )
    if kind == "outliers":
        return random.normal(size=count) * np.where(np.arange(count) % 1000, 1, 100)
    small = {"mixed": 1e-4, "half mixed": 1e-2}[kind]
    return random.normal(size=count) * np.where(random.random(count) < 0.999, small, 1)


def least_error(values: np.ndarray, count: int) -> float:
    """The best of five starts by k-means++, each followed by 50 of Lloyd's steps over all values."""
    random = np.random.default_rng(0)
    ordered = np.sort(values)
    sums = np.concatenate([[0], np.cumsum(ordered)])
    drawn = random.choice(values, min(values.size, 100_000), replace=False)
    errors = []
    for _ in range(5):
        centres = [random.choice(drawn)]
        while len(centres) < count:
            distance = np.min([(drawn - centre) ** 2 for centre in centres], axis=0)
            centres.append(random.choice(drawn, p=distance / distance.sum()))
        centres = np.sort(centres)
        for _ in range(50):
            borders = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2, side="right")
            borders = np.concatenate([[0], borders, [values.size]])
            population, total = np.diff(borders), np.diff(sums[borders])
            centres = np.where(population > 0, total / np.maximum(population, 1), centres)
        errors.append(((ordered - np.repeat(centres, population)) ** 2).sum())
    return min(errors)


@pytest.mark.parametrize(
    ("kind", "count"),
    [(kind, 20_000) for kind in ("laplace", "t2", "t3", "mixed", "half mixed", "sparse", "clipped", "outliers")]
    + [(kind, 1_000_000) for kind in ("t2", "mixed", "clipped")],  # large enough to be sampled
)
def test_gradients_are_as_near_as_after_fifty_steps_over_all_values(kind, count):
    x = torch.from_numpy(gradient(kind, count)).float()
    for bits in (2, 3, 4):
        assert squared_error(f"kmeans:{bits}", x) <= 1.05 * least_error(x.double().numpy(), 1 << bits)


@pytest.mark.parametrize("bits", [5, 6, 7, 8])
@pytest.mark.parametrize("kind", CONTENTS)
def test_never_worse_than_sort_or_uniform_at_equal_bits(bits, kind):
    x = content(kind, (16, 24, 56, 56) if bits % 2 else (8, 16, 768))  # sampled, or as it is
    ours = squared_error(f"kmeans:{bits}", x)
    for other in ("sort", "uniform"):
        assert ours <= squared_error(f"{other}:{bits}", x)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_as_many_distinct_values_as_codes_are_exact(bits):
    x = torch.randn(1 << bits)[torch.randint(0, 1 << bits, (40_000,))]
    assert torch.equal(round_trip(f"kmeans:{bits}", x), x)


@pytest.mark.parametrize("bits", [4, 8])
def test_small_changes_far_from_zero_are_kept(bits):
    x = 1000 + 0.3 * torch.randn(300_000)
    noise = (x.double() - x.double().mean()).square().sum().item()
    assert (
        squared_error(f"kmeans:{bits}", x) < 1.1 * noise * 2.72 / 4**bits
    )  # Panter and Dite's optimum for a normal density


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_one_huge_value_among_many_gets_a_code_of_its_own(bits):
    x = torch.randn(300_000)
    x[123_456] = 1e6
    decoded = round_trip(f"kmeans:{bits}", x)
    assert decoded[123_456] == 1e6
    assert (decoded - x).square().mean() < x[x < 1e6].var()


def test_values_that_a_sample_of_the_tensor_misses_are_counted():
    """A run of large values, in a tensor large enough to be sampled: one place in forty, all next to each other."""
    x = torch.randn(4_000_000)
    x[1_000_000:1_100_000] *= 1000
    clustered = squared_error("kmeans:4", x)
    spread = squared_error("kmeans:4", x[torch.randperm(x.numel())])
    assert clustered == pytest.approx(spread, rel=0.02)


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e30, 3e37])
def test_scale_does_not_matter(scale):
    x = torch.randn(20_000)
    unit = squared_error("kmeans:4", x)
    scaled = x.double() * scale
    error = (round_trip("kmeans:4", scaled.float()).double() - scaled).square().sum().item() / scale**2
    assert error == pytest.approx(unit, rel=0.02)
