"""Partition of units into stages: layouts assign stages to workers, cuts are the units at which stages begin.

units         0 | 1  2  3 | 4  5 | 6         cuts (1, 4, 6)
linear        worker 0, worker 1, worker 2, worker 3
client-server worker 0, worker 1, worker 2, worker 0

Cuts that the user has not chosen balance the load of workers and links.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from thinpipe.pipeline.batchnorm import frozen_statistics

Layout = Literal["linear", "client-server"]
SLACK = 1.05  # among cuts whose slowest part is within 5 % of the best, those that send the fewest bytes are taken


class StageModule(nn.Module):
    """A sequence of units; each takes the one or more tensors that the previous one returned."""

    def __init__(self, units: Sequence[nn.Module], plan: str = "") -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.plan = plan  # the model and its cuts, which workers compare before the first step
        self.calls: list[Callable[..., Any]] = list(units)  # in place of units; one call may stand for several

    @property
    def asks(self) -> set[str]:
        """The names of model inputs that units here take in addition to the output of the previous unit.

        They are passed to the schedule, ``step(..., input_ids=ids)``, on the worker that has such a stage.
        """
        return {name for unit in self.units for name in getattr(unit, "asks", ())}

    def forward(self, *values: Any, **inputs: Any) -> Any:
        for unit in self.calls:
            output = unit(*values, **{name: inputs[name] for name in getattr(unit, "asks", ())})
            values = output if isinstance(output, tuple) else (output,)
        # Tensors sent are contiguous, whatever memory format the layers use: torch compares strides.
        return tuple(map(_contiguous, output)) if isinstance(output, tuple) else _contiguous(output)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def stage_count(workers: int, layout: Layout) -> int:
    """Return the number of stages: one per worker, and one more if the client has both ends."""
    if layout not in get_args(Layout):
        raise ValueError(f"a layout is {' or '.join(map(repr, get_args(Layout)))}, got {layout!r}")
    return workers + (layout == "client-server")


def stages_of(worker: int, workers: int, layout: Layout) -> list[int]:
    """Return the indices of a worker's stages: stage i is on worker i mod R."""
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
    """Return the units at which stages begin, balanced by the units' costs, or by their number without costs.

    Args:
        client_layers: for ``client-server``, how many units the client has at the start and at the end.
        costs: from ``measure_units``.
        link_mbit_per_s, wire_ratio: rate of a link, and compressed size of a tensor divided by its size.
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
    """Return the modules of the stages, cut before each unit whose number is in ``cuts``."""
    bounds = [0, *cuts, len(units)]
    if any(start >= end for start, end in itertools.pairwise(bounds)):
        raise ValueError(
            f"cuts are rising numbers of units from 1 to {len(units) - 1}, so that no stage is empty: got {list(cuts)}"
        )
    parameters = sum(parameter.numel() for unit in units for parameter in unit.parameters())
    plan = f"{len(units)} units with {parameters} parameters, cut before {list(cuts)}"
    return [StageModule(units[start:end], plan) for start, end in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class UnitCost:
    """The cost of one unit for one chunk."""

    ms: float  # forward and backward
    activation_bytes: int  # of its output, which is sent if the cut is after it


def measure_units(units: Sequence[nn.Module], *inputs: Tensor, repeat: int = 3) -> list[UnitCost]:
    """Return the cost of each unit: run one microbatch forward and backward, and keep its fastest time."""
    costs = []
    values: tuple[Any, ...] = inputs
    for unit in units:
        values = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in values)
        leaves = [value for value in values if value.requires_grad] or list(unit.parameters())
        fastest = float("inf")
        with frozen_statistics(unit):
            for _ in range(repeat):
                began = _clock(inputs[0].device)
                output = unit(*values)
                outputs = output if isinstance(output, tuple) else (output,)
                roots = [value for value in outputs if value.requires_grad]
                torch.autograd.grad(roots, leaves, roots, allow_unused=True)
                fastest = min(fastest, (_clock(inputs[0].device) - began) * 1e3)
        costs.append(UnitCost(fastest, sum(value.numel() * value.element_size() for value in outputs)))
        values = outputs
    return costs


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def balance(
    costs: Sequence[UnitCost],
    stages: int,
    ends_together: bool = False,
    link_mbit_per_s: float | None = None,
    wire_ratio: float = 1.0,
) -> tuple[int, ...]:
    """Return the cuts into ``stages`` stages; with ``ends_together`` the first and the last are on one worker.

    They minimize the slowest part: the units of a worker, or the bytes of a link if its rate is given.
    """
    units = len(costs)
    if not 1 <= stages <= units:
        raise ValueError(f"every stage needs a unit: got {stages} stages and {units} units; take fewer workers")
    total_ms = [0.0, *accumulate(cost.ms for cost in costs)]
    link_ms = [
        cost.activation_bytes * wire_ratio * 8e-3 / link_mbit_per_s if link_mbit_per_s else 0.0 for cost in costs
    ]

    def best_within(limit: float) -> tuple[int, tuple[int, ...]] | None:
        """Return the fewest bytes with no worker and no link above a limit, and the cuts for it."""

        @cache
        def rest(start: int, parts: int, end: int) -> tuple[int, tuple[int, ...]] | None:
            """Return the fewest bytes and the cuts of units start to end into ``parts`` stages on different workers."""
            if parts == 1:
                return (0, ()) if total_ms[end] - total_ms[start] <= limit else None
            found = []
            for cut in range(start + 1, end - parts + 2):
                if total_ms[cut] - total_ms[start] > limit:
                    break
                tail = rest(cut, parts - 1, end) if link_ms[cut - 1] <= limit else None
                if tail:
                    found.append((costs[cut - 1].activation_bytes + tail[0], (cut, *tail[1])))
            return min(found, default=None)

        if not ends_together:
            return rest(0, stages, units)
        found = []
        for first in range(1, units - stages + 2):
            for last in range(first + stages - 2, units):
                client_ms = total_ms[first] + total_ms[units] - total_ms[last]
                if max(client_ms, link_ms[first - 1], link_ms[last - 1]) > limit:
                    continue
                middle = rest(first, stages - 2, last)
                if middle:
                    sent = costs[first - 1].activation_bytes + costs[last - 1].activation_bytes
                    found.append((sent + middle[0], (first, *middle[1], last)))
        return min(found, default=None)

    spans = {total_ms[j] - total_ms[i] for i in range(units) for j in range(i + 1, units + 1)}
    if ends_together:
        spans |= {total_ms[units] - span for span in spans}
    limits = sorted(spans | set(link_ms))
    lowest = limits[min(bisect_left(limits, True, key=lambda limit: best_within(limit) is not None), len(limits) - 1)]
    chosen = best_within(lowest * SLACK)
    assert chosen is not None  # the largest limit allows everything
    return chosen[1]
