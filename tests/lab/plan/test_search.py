"""The search: cuts against brute force, limits, and which way wins where."""

import json
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.documents import ROOT
from tests.lab.plan.profiles import cluster, profile
from thinpipe.lab.plan.cuts import client_server_cuts, linear_cuts, stage_times
from thinpipe.lab.plan.predictor import Candidate, Predictor
from thinpipe.lab.plan.search import Limits, search
from thinpipe.lab.plan.verdict import judge, lines, rows
from thinpipe.options import OptionError

whole = st.integers(1, 9)
UNITS = 6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(whole, min_size=UNITS, max_size=UNITS), min_size=2, max_size=4),
    st.lists(st.lists(whole, min_size=UNITS + 1, max_size=UNITS + 1), min_size=4, max_size=4),
    st.booleans(),
)
def test_cuts_are_the_best_of_all(work: list[list[int]], links: list[list[int]], is_round: bool) -> None:
    stages = [stage_times(each, [1.0] * UNITS, np.inf) for each in work]
    hops = [np.array(each, float) for each in links[: len(work) - 1 + is_round]]

    def slowest(cuts: tuple[int, ...]) -> float:
        parts = [sum(work[rank % len(work)][a:b]) for rank, (a, b) in enumerate(pairwise((0, *cuts, UNITS)))]
        if is_round:
            parts[0] += parts.pop()
        return max([*parts, *(hop[cut] for hop, cut in zip(hops, cuts, strict=True))])

    found = client_server_cuts(work[0], stages[0], stages[1:], hops) if is_round else linear_cuts(stages, hops)
    best = min(map(slowest, combinations(range(1, UNITS), len(hops))), default=None)
    assert found is not None
    assert slowest(found) == best


def test_cuts_respect_memory() -> None:
    small, large = stage_times([1] * 6, [1] * 6, 2), stage_times([1] * 6, [1] * 6, 9)
    free = np.zeros(7)
    assert linear_cuts([small, large], [free]) == (2,)
    assert linear_cuts([small, small], [free]) is None
    assert client_server_cuts([1] * 6, large, [small], [free, free], (2, 1)) is not None


def test_a_fast_network_pays_and_a_slow_one_does_not() -> None:
    fast = search(Predictor(profile(), cluster(3, "10gbit,0.1ms"), 32), Limits())[0]
    assert fast.candidate.parallel == "pipeline"
    assert len(fast.candidate.machines) == 3
    alone = search(Predictor(profile(), cluster(3, "100kbit,50ms"), 32), Limits())[0]
    assert alone.candidate == Candidate(parallel="none", machines=(0,))


def test_small_models_are_replicated() -> None:
    small = profile(parameters=1000)
    assert search(Predictor(small, cluster(2, "1gbit,0.1ms"), 32), Limits())[0].candidate.parallel == "data"


def test_a_machine_that_is_faster_gets_more_units() -> None:
    made = cluster(2, "10gbit,0.1ms")
    made = made.__class__(
        name="two",
        machines=(made.machines[0], made.machines[1].__class__(name="fast", tflops=4.0)),
        links={},
        default=made.default,
    )
    best = search(Predictor(profile(), made, 32), Limits(parallel=("pipeline",), layouts=("linear",)))[0]
    assert best.candidate.cuts == (2,)


def test_limits() -> None:
    predictor = Predictor(profile(), cluster(3, "5mbit,5ms"), 16)
    free = search(predictor, Limits(parallel=("pipeline",)))
    assert free[0].candidate.compress == "1bit"
    for each in search(predictor, Limits(parallel=("pipeline",), nats=0.003, chunks=(4,), client_layers=(2, 3))):
        made = each.candidate
        assert made.compress in ("none", "8bit", "4bit", "3bit")
        assert (made.chunks, made.layout) == (4, "client-server")
        assert made.cuts[0] >= 2
        assert made.cuts[-1] <= 7
    with pytest.raises(OptionError, match=r"no codec adds 0.0001 nats or less: 2bit 0.0147"):
        search(predictor, Limits(compress=("2bit",), nats=1e-4))
    least = min(max(each.memory_bytes) for each in free)
    for each in search(predictor, Limits(parallel=("pipeline",), memory_bytes=round(1.1 * least))):
        assert max(each.memory_bytes) <= 1.1 * least


@pytest.mark.parametrize(
    ("machines", "memory", "message"),
    [
        (2, "100MB", r"its unit layer-\d needs 320 MB, 220 MB more than any worker has \(100 MB\)"),
        (2, "700MB", r"need 3.2 GB, 1.8 GB more than the 2 workers have together \(1.4 GB\)"),
        (5, "640MB", r"the plan that comes nearest lacks .* on node-\d, which needs"),
    ],
)
def test_what_does_not_fit_is_one_line(machines: int, memory: str, message: str) -> None:
    adam = profile(parameters=20_000_000, optimizer_bytes=8)
    with pytest.raises(OptionError, match=message) as raised:
        search(Predictor(adam, cluster(machines, memory=memory), 32), Limits())
    assert "\n" not in str(raised.value)


def test_the_verdict_is_first_and_fits_the_terminal() -> None:
    predictor = Predictor(profile(train_samples=1000, spread=0.16), cluster(4, "300mbit,5ms"), 32)
    verdict = judge(predictor, Limits(), search(predictor, Limits()), epochs=3)
    text = lines(verdict)
    assert " machines: " in text[0]
    assert "± 16 %; node-0 alone: " in text[0]
    assert "for your data, " in text[1]
    assert all(len(line) <= 80 for line in text), text
    assert len(verdict.alternatives) == 3
    assert [row["role"] for row in rows(verdict)] == ["plan", *["alternative"] * 3]
    assert rows(verdict)[0]["options"]["cuts"]
    assert any(name.startswith("twice the rate") for name, _ in verdict.helps)
    assert all(gain >= 1 for name, gain in verdict.helps if "bits" not in name)


def test_the_interval_of_a_measured_plan_is_that_of_the_study() -> None:
    predictor = Predictor(profile(spread=0.01), cluster(2), 32)
    spread = judge(predictor, Limits(), search(predictor, Limits())).spread
    checks = json.loads((ROOT / "benchmarks/plan/record.json").read_text())["checks"]
    assert any(f"inside ± {spread:.1%}" in check["claim"] and check["measured"] >= 0.85 for check in checks)


def test_candidates_of_many_machines_use_neighbours() -> None:
    found = search(Predictor(profile(units=40), cluster(12, "1gbit,2ms"), 64), Limits(nats=0.003, chunks=(16,)))
    assert {len(each.candidate.machines) for each in found} >= {1, 2, 4, 8, 12}
