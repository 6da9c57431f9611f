"""Partition: cuts by hand, by client layers and by cost."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from thinpipe.pipeline.partition import SLACK, UnitCost, balance, choose_cuts, cut_units, measure_units, stages_of
from thinpipe.train.models.sequential import units_of


def test_sequential_and_unknown_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert units_of(model) == list(model)
    with pytest.raises(ValueError, match=r"got Linear\. Make it an nn\.Sequential"):
        units_of(nn.Linear(2, 2))


def test_stages_of_workers() -> None:
    assert [stages_of(w, 3, "linear") for w in range(3)] == [[0], [1], [2]]
    assert [stages_of(w, 3, "client-server") for w in range(3)] == [[0, 3], [1], [2]]
    with pytest.raises(ValueError, match="'linear' or 'client-server', got 'ring'"):
        stages_of(0, 3, "ring")  # type: ignore[arg-type]


def test_cuts_by_hand_and_by_client_layers() -> None:
    units = [nn.Linear(2, 2) for _ in range(7)]
    assert [len(stage.units) for stage in cut_units(units, [1, 4, 6])] == [1, 3, 2, 1]
    assert choose_cuts(7, 3, "client-server", client_layers=(1, 2)) == (1, 3, 5)
    for wrong in ([0, 2], [2, 2], [3, 2], [7]):
        with pytest.raises(ValueError, match="no stage is empty"):
            cut_units(units, wrong)
    with pytest.raises(ValueError, match="leave every server a unit"):
        choose_cuts(7, 4, "client-server", client_layers=(3, 2))
    with pytest.raises(ValueError, match="5 stages and 4 units"):
        choose_cuts(4, 5)


def slowest(costs: list[UnitCost], cuts: tuple[int, ...], together: bool, mbit: float | None) -> float:
    bounds = [0, *cuts, len(costs)]
    stages = [sum(cost.ms for cost in costs[i:j]) for i, j in pairwise(bounds)]
    if together:
        stages = [stages[0] + stages[-1], *stages[1:-1]]
    links = [costs[cut - 1].activation_bytes * 8e-3 / mbit if mbit else 0.0 for cut in cuts]
    return max(stages + links)


@pytest.mark.parametrize("mbit", [None, 100.0], ids=["free links", "thin links"])
@pytest.mark.parametrize("together", [False, True], ids=["linear", "client-server"])
@pytest.mark.parametrize("seed", range(5))
def test_balance_is_as_good_as_trying_everything(seed: int, together: bool, mbit: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(8, 2, generator=generator)
    costs = [UnitCost(float(ms) * 10, int(size * 100_000)) for ms, size in numbers]
    cuts = balance(costs, 4, together, mbit)
    best = min(slowest(costs, candidate, together, mbit) for candidate in combinations(range(1, 8), 3))
    assert slowest(costs, cuts, together, mbit) <= best * SLACK * (1 + 1e-9)


@pytest.mark.parametrize("together", [False, True], ids=["linear", "client-server"])
def test_balance_of_as_many_stages_as_units_gives_each_one(together: bool) -> None:
    costs = [UnitCost(ms, 1000) for ms in (1.0, 5.0, 2.0, 9.0, 3.0)]
    assert balance(costs, len(costs), together) == (1, 2, 3, 4)


def test_balanced_cuts_minimize_traffic_at_equal_time() -> None:
    costs = [UnitCost(10, 1000), UnitCost(0.1, 10), UnitCost(10, 1000), UnitCost(0.1, 10)]
    assert balance(costs, 2) == (2,)


def test_measured_costs() -> None:
    units = [nn.Linear(64, 64), nn.Linear(64, 16)]
    costs = measure_units(units, torch.randn(8, 64))
    assert [cost.activation_bytes for cost in costs] == [8 * 64 * 4, 8 * 16 * 4]
    assert all(cost.ms > 0 for cost in costs)
    assert all(p.grad is None for unit in units for p in unit.parameters())
