"""Schedules derived from torch's base classes, given as rows of actions: one row for each worker."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.distributed.pipelining.schedules import (
    FORWARD,
    PipelineScheduleMulti,
    _Action,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)

Rows = tuple[str, ...]  # actions as torch's CSV files have them; "-" is a time step without one


def actions_of(rows: Rows) -> dict[int, list[_Action | None]]:
    """Return the actions of each worker."""
    return {
        worker: [None if name == "-" else _Action.from_str(name) for name in row.split()]
        for worker, row in enumerate(rows)
    }


class FromRows(PipelineScheduleMulti):
    """A schedule of the public base class, which sends at the end of each time step, also to itself."""

    rows: ClassVar[Rows]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pipeline_order = actions_of(self.rows)
        self._validate_and_set_stage_mapping(self.pipeline_order)


class VShaped(FromRows):
    rows = ("0F0 - - 3F0 3B0 - - 0B0", "- 1F0 2F0 - - 2B0 1B0 -")


class Unbalanced(FromRows):
    rows = ("0F0 1F0 - - 4F0 4B0 - - 1B0 0B0", "- - 2F0 3F0 - - 3B0 2B0 - -")


class VShapedZeroBubble(FromRows):
    rows = ("0F0 - - 3F0 3I0 3W0 - 0I0 0W0", "- 1F0 2F0 - - 2I0 1I0 2W0 1W0")


class ZeroBubble(FromRows):
    rows = (
        "0F0 0F1 2F0 2F1 - 2I0 2W0 0I0 2I1 0W0 0I1 2W1 0W1",
        "- 1F0 1F1 3F0 3I0 3F1 1I0 3I1 3W0 1I1 1W0 3W1 1W1",
    )


class LateSends(_PipelineScheduleRuntime):
    """All sends and receives are given, the sends as late as possible; no action ends the step (REDUCE_GRAD)."""

    rows: ClassVar[Rows] = (
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1F1 1SEND_F0 1SEND_F1 1RECV_B0 1RECV_B1 1B0 1B1 1SEND_B0 1SEND_B1",
        "2RECV_F0 2RECV_F1 2F0 2F1 2B0 2B1 2SEND_B0 2SEND_B1",
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prepare_schedule_with_comms(actions_of(self.rows), format="compute_comms")


class Callback:
    """A function of a user's own in place of torch's for forwards."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []

    def __call__(self, action: _Action, context: Any) -> None:
        schedule, index, chunk = context.schedule_ref, action.stage_index, action.microbatch_index
        assert chunk is not None
        stages = {stage.stage_index: stage for stage in schedule._stages}
        self.chunks.append((index, chunk))
        if (index, chunk) in schedule.fwd_recv_ops:
            _wait_batch_p2p(schedule.fwd_recv_ops.pop((index, chunk)))
        output = stages[index].forward_one_chunk(chunk, context.arg_mbs[chunk], context.kwarg_mbs[chunk])
        schedule._maybe_compute_loss(stages[index], output, context.target_mbs, chunk)
        if index + 1 in stages:
            stages[index + 1].set_local_fwd_input(output, chunk)

    def register(self, schedule: _PipelineScheduleRuntime) -> None:
        schedule.register_custom_function(FORWARD, self)
