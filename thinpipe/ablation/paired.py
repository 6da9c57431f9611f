"""Whether a method differs from the uncompressed one by more than seeds do: a paired t-test over equal seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

_LEAST_PAIRS = 2


def p_value(metrics: Sequence[float], baseline: Sequence[float]) -> float | None:
    """How likely a mean difference this large would be if there were none; None of fewer than two pairs.

    The two sequences have the seeds in the same order.
    """
    differences = [ours - theirs for ours, theirs in zip(metrics, baseline, strict=True)]
    if len(differences) < _LEAST_PAIRS:
        return None
    if max(differences) == min(differences):  # no spread: the test would divide by zero
        return 1.0 if mean(differences) == 0 else 0.0
    from scipy.stats import ttest_1samp  # imported here: it takes half a second

    return float(ttest_1samp(differences, 0.0).pvalue)
