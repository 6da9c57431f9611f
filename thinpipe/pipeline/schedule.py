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
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from thinpipe.pipeline.order import Order, make_order
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
        actions = make_order(order, placement, n_microbatches)
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, **torch_options)
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
