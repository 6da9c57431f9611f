"""Levels of a normal distribution: against published tables, Lloyd's conditions, and a sample."""

import itertools
import math
from statistics import NormalDist

import pytest
import torch

from thinpipe.codecs.normal import boundaries, distortion, levels

# J. Max, Quantizing for minimum distortion, 1960, table I: the positive levels, and the squared error.
PUBLISHED = {
    0: ([], 1.0),
    1: ([0.7980], 0.3634),
    2: ([0.4528, 1.510], 0.1175),
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}
BITS = range(9)


@pytest.mark.parametrize("bits", PUBLISHED)
def test_levels_and_errors_are_the_published_ones(bits):
    half, error = PUBLISHED[bits]
    assert [level for level in levels(bits) if level > 0] == pytest.approx(half, rel=6e-4)
    assert distortion(bits) == pytest.approx(error, rel=6e-4)


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_symmetric_float32_and_apart(bits):
    chosen = levels(bits)
    assert len(chosen) == 2**bits
    assert chosen == tuple(-level for level in reversed(chosen))
    assert torch.tensor(chosen, dtype=torch.float32).tolist() == list(chosen)
    assert all(low < edge < high for low, edge, high in zip(chosen, boundaries(bits), chosen[1:], strict=False))


@pytest.mark.parametrize("bits", BITS)
def test_every_level_is_the_mean_of_its_cell(bits):
    normal = NormalDist()
    edges = [-math.inf, *boundaries(bits), math.inf]
    density = [0.0 if math.isinf(edge) else normal.pdf(edge) for edge in edges]
    below = [normal.cdf(edge) if math.isfinite(edge) else float(edge > 0) for edge in edges]
    for level, (i, j) in zip(levels(bits), itertools.pairwise(range(len(edges))), strict=True):
        assert (density[i] - density[j]) / (below[j] - below[i]) == pytest.approx(level, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("bits", BITS)
def test_distortion_is_the_error_of_a_sample(bits):
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(bits), dtype=torch.float64)
    codes = torch.bucketize(x, torch.tensor(boundaries(bits), dtype=torch.float64), right=True)
    lost = (x - torch.tensor(levels(bits), dtype=torch.float64)[codes]).square().mean()
    assert lost.item() == pytest.approx(distortion(bits), rel=0.02)


@pytest.mark.parametrize("bits", [-1, 9])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(ValueError, match="0 to 8 bits"):
        levels(bits)
