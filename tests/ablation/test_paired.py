"""A method against the uncompressed one, seed by seed."""

from __future__ import annotations

import pytest
from scipy.stats import ttest_rel

from thinpipe.ablation.rows import p_value


def test_it_is_the_paired_t_test() -> None:
    ours, theirs = [0.97, 0.98, 0.96, 0.99, 0.975], [0.98, 0.985, 0.975, 0.985, 0.98]
    assert p_value(ours, theirs) == pytest.approx(ttest_rel(ours, theirs).pvalue)


def test_without_a_spread() -> None:
    assert p_value([0.5, 0.6], [0.5, 0.6]) == 1.0
    assert p_value([0.75, 0.5], [0.5, 0.25]) == 0.0


def test_one_seed_says_nothing() -> None:
    assert p_value([0.9], [0.8]) is None


def test_seeds_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        p_value([0.9, 0.8], [0.8])
