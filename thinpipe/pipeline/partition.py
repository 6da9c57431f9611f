"""Units to stages: layouts say which worker has which stage, cuts say where stages begin.

units         0 | 1  2  3 | 4  5 | 6         cuts (1, 4, 6)
linear        worker 0, worker 1, worker 2, worker 3
client-server worker 0, worker 1, worker 2, worker 0
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

from thinpipe.pipeline.balance import UnitCost, balance

Layout = Literal["linear", "client-server"]


class StageModule(nn.Module):
    """Units in a row; what one returns, one tensor or several, the next one takes."""

    def __init__(self, units: Sequence[nn.Module], plan: str = "") -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.plan = plan  # the whole model and its cuts, which workers compare before the first step

    @property
    def asks(self) -> set[str]:
        """Inputs of the whole model, by their names, that units here take beside what the one before returned.

        A schedule hands them over: ``step(..., input_ids=ids)``, on the worker that has such a stage.
        """
        return {name for unit in self.units for name in getattr(unit, "asks", ())}

    def forward(self, *values: Any, **inputs: Any) -> Any:
        for unit in self.units:
            output = unit(*values, **{name: inputs[name] for name in getattr(unit, "asks", ())})
            values = output if isinstance(output, tuple) else (output,)
        # What travels is contiguous, whatever memory format the layers work in: torch compares strides.
        return tuple(map(_contiguous, output)) if isinstance(output, tuple) else _contiguous(output)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def stage_count(workers: int, layout: Layout) -> int:
    """Stages of a pipeline: one per worker, and one more where the client has both ends."""
    if layout not in get_args(Layout):
        raise ValueError(f"a layout is {' or '.join(map(repr, get_args(Layout)))}, got {layout!r}")
    return workers + (layout == "client-server")


def stages_of(worker: int, workers: int, layout: Layout) -> list[int]:
    """The stages that a worker has: stage i is on worker i mod R."""
    return list(range(worker, stage_count(workers, layout), workers))


def choose_cuts(
    units: int,
    workers: int,
    layout: Layout = "linear",
    *,
    client_layers: tuple[int, int] | None = None,
    costs: Sequence[UnitCost] | None = None,
    link_mbit_per_s: float | None = None,
    wire_ratio: float = 1.0,
) -> tuple[int, ...]:
    """Where stages begin: balanced by what units cost, or by their number if that was not measured.

    Args:
        client_layers: for ``client-server``, how many units the client has at the start and at the end.
        costs: from ``measure_units``.
        link_mbit_per_s, wire_ratio: what a link carries, and how much of each tensor travels under the codec.
    """
    count = stage_count(workers, layout)
    if costs is None:
        costs = [UnitCost(1.0, 1)] * units
    if len(costs) != units:
        raise ValueError(f"every unit has a cost: got {units} units and {len(costs)} costs")
    if client_layers is None:
        return balance(costs, count, layout == "client-server", link_mbit_per_s, wire_ratio)
    first, last = client_layers
    middle = units - first - last
    if layout != "client-server" or first < 1 or last < 1 or middle < workers - 1:
        raise ValueError(
            f"client layers are for the client-server layout, 1 or more at both ends, and leave every server a unit: "
            f"got {first} and {last} of {units} units, layout {layout!r}, servers: {workers - 1}. Take fewer "
            "workers, or other client layers"
        )
    inner = balance(costs[first : units - last], workers - 1, False, link_mbit_per_s, wire_ratio)
    return (first, *(first + cut for cut in inner), units - last)


def cut_units(units: Sequence[nn.Module], cuts: Sequence[int]) -> list[StageModule]:
    """The stages of a model, cut before each of the units whose numbers ``cuts`` gives."""
    bounds = [0, *cuts, len(units)]
    if any(start >= end for start, end in itertools.pairwise(bounds)):
        raise ValueError(
            f"cuts are rising numbers of units from 1 to {len(units) - 1}, so that no stage is empty: got {list(cuts)}"
        )
    parameters = sum(parameter.numel() for unit in units for parameter in unit.parameters())
    plan = f"{len(units)} units with {parameters} parameters, cut before {list(cuts)}"
    return [StageModule(units[start:end], plan) for start, end in itertools.pairwise(bounds)]
