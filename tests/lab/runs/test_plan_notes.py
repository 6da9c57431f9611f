"""Notes below the plan of a run: first steps that have more bits, and links on which nothing is compressed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lab.runs.made_run import make_plan
from thinpipe.lab.records import report
from thinpipe.lab.runs.run_tables import SHORT_RUN, plan_tables


def notes(plan: object) -> str:
    return report.plain_text(plan_tables(plan)[1])  # type: ignore[arg-type]


def with_axes(first_steps: int, last_step: int, **changes: int) -> object:
    plan = make_plan()
    first, *rest = plan.links
    learned = {"first_wire_bytes": 262_144, "first_steps": first_steps, "first_bits": 8, "learned_bytes": 1000}
    axes = replace(first, spec="axes:2", wire_bytes=65_536, **learned)
    return replace(plan, links=(axes, *rest), last_step=last_step, **changes)


def test_a_short_run_has_a_note_on_its_first_steps() -> None:
    assert "The activations of the first 35 of 80 steps are sent at 8 bits, before the basis is learned." in notes(
        with_axes(35, 80)
    )
    assert "of the first 20 of 20 steps are sent at 8 bits" in notes(with_axes(35, 20))
    assert "of the first 35 of 80 batches are sent at 8 bits" in notes(with_axes(35, 20, accumulate=4))


@pytest.mark.parametrize("plan", [with_axes(35, SHORT_RUN * 35 + 1), with_axes(35, 80, first_step=35), make_plan()])
def test_a_long_run_or_a_later_part_is_not(plan: object) -> None:
    assert "are sent at" not in notes(plan)


def test_links_without_compression() -> None:
    plan = make_plan()
    assert "Nothing is compressed" not in notes(plan)
    first, second, *rest = plan.links
    reason = "sort:6+2 encodes no complex64"
    raw = (replace(first, uncompressed=reason), replace(second, uncompressed=reason), *rest)
    links = f"{first.source} to {first.target}, {second.source} to {second.target}"
    assert f"Nothing is compressed from stage {links}: {reason}." in notes(replace(plan, links=raw))
