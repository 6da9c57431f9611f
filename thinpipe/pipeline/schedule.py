"""Schedules with thinpipe's own orders: client-server and linear pipelines.

                    stage 0           stage 1        ...        stage R
    client-server   worker 0, the     worker 1       ...        worker 0
                    client            a server                  again: the last layers, the loss, the labels
    linear          worker 0          worker 1       ...        (there are only R stages)

torch's own schedules work as well (``thinpipe.PipelineStage`` supports all of them); these add the client-server
placement, and orders for any number of chunks, while torch's 1F1B needs at least as many as there are stages.

Private names of torch used here, seen on 2.11 and 2.13: ``_PipelineScheduleRuntime`` runs any order of actions, its
``pipeline_order``, and ``_prepare_schedule_with_comms`` adds the sends and receives to one; ``_Action`` and
``_ComputationType`` describe its actions. Of a stage: ``group_rank`` and ``group_size``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from thinpipe.comm.group import Group
from thinpipe.pipeline.order import Order, in_flight, make_order, needed_in_flight
from thinpipe.pipeline.stage import PipelineStage

_KINDS = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}


class OrderedSchedule(_PipelineScheduleRuntime):
    """A schedule with stage i on worker i mod R, in one of thinpipe's orders."""

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        order: Order = "gpipe",
        **torch_options: Any,
    ) -> None:
        first = stages[0]
        placement = [stage % first.group_size for stage in range(first.num_stages)]
        expected = [stage for stage, worker in enumerate(placement) if worker == first.group_rank]
        found = [stage.stage_index for stage in stages]
        if found != expected:
            raise ValueError(
                f"worker {first.group_rank} of {first.group_size} has stages {expected} of {first.num_stages}, "
                f"in this order, got {found}"
            )
        self._placement, self._chunks = placement, n_microbatches
        make_order(order, placement, n_microbatches)  # raises ValueError for invalid arguments
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, **torch_options)
        self._set_order(order)

    def _set_order(self, order: Order) -> None:
        actions = make_order(order, self._placement, self._chunks)
        self.order = order
        self.pipeline_order = {
            worker: [_Action(stage, _KINDS[kind], chunk) for stage, kind, chunk in todo]
            for worker, todo in actions.items()
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


class ClientServerSchedule(OrderedSchedule):
    """A schedule of R workers and R+1 stages: worker 0, the client, has the first and the last stage.

    So data and labels never leave the client.

    Args:
        stages: those of this worker: stage 0 and stage R on the client, stage i on server i.
        n_microbatches: the chunks each batch is cut into, 1 or more.
        loss_fn: loss of the last stage's output and a chunk of the target; None for evaluation only.
        order: ``"gpipe"``, all forwards before all backwards; ``"1f1b"``, which holds fewer activations; or
            ``"1f1b:N"``, which has N chunks in flight, for links with a long delay.
        torch_options: as torch's multi-stage schedules (``scale_grads``, ``args_chunk_spec`` ...).
    """

    def __init__(self, stages: list[PipelineStage], *args: Any, **kwargs: Any) -> None:
        workers, count = stages[0].group_size, stages[0].num_stages
        if workers < 2 or count != workers + 1:
            raise ValueError(
                f"client and servers are R workers, at least 2, with R+1 stages: "
                f"got {workers} workers and {count} stages"
            )
        super().__init__(stages, *args, **kwargs)


class LinearSchedule(OrderedSchedule):
    """A schedule of R workers with one stage each; arguments as ``ClientServerSchedule``, one stage, not a list."""

    def __init__(self, stage: PipelineStage, *args: Any, **kwargs: Any) -> None:
        if stage.num_stages != stage.group_size:
            raise ValueError(
                f"a line has one stage per worker: got {stage.group_size} workers and {stage.num_stages} stages"
            )
        super().__init__([stage], *args, **kwargs)


class Schedule1F1B(LinearSchedule):
    """A drop-in for torch's ``Schedule1F1B`` with as many microbatches in flight as the delay of the links needs.

    torch's has one per stage in flight, so every worker waits for a round trip after each if that takes longer than a
    microbatch. Here the second step measures delay and computation, and later ones have more in flight. More
    microbatches in flight need memory for their activations.

    Args:
        stage, n_microbatches, loss_fn: as torch's; fewer microbatches than stages are possible.
        max_in_flight: most microbatches in flight on the first stage; None: all of a batch, if the delay needs them.
        torch_options: all other options of torch's schedule.
    """

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        max_in_flight: int | None = None,
        **torch_options: Any,
    ) -> None:
        super().__init__(stage, n_microbatches, loss_fn, order="1f1b", **torch_options)
        self._stage, self._most, self._compute_ms = stage, max_in_flight or n_microbatches, [0.0]
        stage.warns_of_delay = False  # this schedule adapts

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        if len(self._compute_ms) < 3:
            self._compute_ms.append(sum(self._stage.compute_ms().values()))
            if len(self._compute_ms) == 3:
                self._adapt(self._compute_ms[2] - self._compute_ms[1])
        return result

    def _adapt(self, compute_ms: float) -> None:
        """Choose the number of microbatches in flight. A collective."""
        stage = self._stage
        everyone = Group.of(stage.group, stage.device).gather([stage.delay_ms, compute_ms / self._chunks])
        delay_ms, chunk_ms = map(max, zip(*everyone, strict=True))
        needed = min(needed_in_flight(stage.num_stages, delay_ms, chunk_ms), self._chunks, self._most)
        if needed > in_flight(self.order, stage.num_stages, self._chunks):
            self._set_order(f"1f1b:{needed}")
            for link in stage.links.sends:
                link.window = max(link.window, needed)  # a worker that could compute does not wait for a link


def torch_schedule(order: Order, stages: int, chunks: int) -> Any:
    """Return torch's class of schedule for a line of stages in this order; None if it has none."""
    if order == "gpipe":
        return pipelining.ScheduleGPipe
    return pipelining.Schedule1F1B if order == "1f1b" and chunks >= stages else None
