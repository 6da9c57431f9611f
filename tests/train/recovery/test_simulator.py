"""Recovery under the faults of 20,000 seeds; and bugs planted in it, which the same seeds find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.train.recovery.planted import PLANTED
from tests.train.recovery.simulator import World, failures

CHUNK = 1000


@pytest.mark.parametrize("first", range(0, 20_000, CHUNK))
def test_no_seed_violates_an_invariant(first: int) -> None:
    assert failures(range(first, first + CHUNK)) == []


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(failures(range(first, first + 50)) for first in range(0, 20_000, 50))


def test_runs_repeat() -> None:
    """A seed has one course of events, whatever ran before."""
    events: list[list[str]] = [[], []]
    for each in events:
        World(3, log=each.append).run()
    assert events[0] == events[1]
    assert len(events[0]) > 20
