"""Cuts that the user has chosen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import Pool
from tests.train.toy import ToyTask, run_toy, settings_for
from thinpipe.options import OptionError
from thinpipe.train.resolve import resolve_for_resume


def units(group: Any, given: dict[str, Any]) -> Any:
    plan = run_toy(group, ToyTask(), epochs=1, **given).plan
    return None if plan is None else [holding.units for holding in plan.holdings]


def test_stages_begin_at_the_cuts(pool: Pool) -> None:
    assert pool.run(units, 2, {"cuts": (1, 4)})[0] == [1, 3, 2]
    assert pool.run(units, 2, {"cuts": (5,), "layout": "linear"})[0] == [5, 1]


@pytest.mark.parametrize("cuts", [(3,), (4, 2), (0, 3), (3, 6), (2, 2)])
def test_cuts_that_do_not_fit_are_one_line(pool: Pool, cuts: tuple[int, ...]) -> None:
    with pytest.raises(
        Exception, match="cuts are 2 rising numbers of units from 1 to 5, for the 3 stages of 2 workers"
    ):
        pool.run(units, 2, {"cuts": cuts})


def test_options_it_excludes() -> None:
    with pytest.raises(OptionError, match="cuts name all stages: leave out client_layers"):
        settings_for(ToyTask(), None, workers=2, cuts=(1, 4), client_layers=(1, 1))
    with pytest.raises(OptionError, match="cuts shape a pipeline"):
        settings_for(ToyTask(), None, workers=1, parallel="none", cuts=(1,))


def test_a_run_resumed_on_other_workers_is_cut_anew() -> None:
    saved = settings_for(ToyTask(), None, workers=2, cuts=(1, 4))
    assert saved.client_layers is None
    assert resolve_for_resume({"workers": 3}, saved).cuts is None
    assert resolve_for_resume({"cuts": (2, 3)}, saved).cuts == (2, 3)
    assert resolve_for_resume({}, saved).cuts == (1, 4)
