"""Stages whose neighbours are on the same worker: they hand over tensors directly, unless links connect them.

``_PipelineScheduleRuntime``, on which most schedules of torch are built, calls ``set_local_fwd_input``,
``get_local_bwd_output`` and ``set_local_bwd_input``. ``PipelineScheduleMulti`` calls none of them: it takes send and
receive operations from every stage, also to its own rank, and those of ``stage`` then call the methods here.

Private names of torch used here, seen on 2.11 and 2.13. Overridden: these three methods. Read: ``has_backward``;
``fwd_cache``, the outputs of each chunk; the ``buffer`` of each of ``grad_recv_info``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from thinpipe.pipeline.linked_stage import LinkedStage
from thinpipe.pipeline.shaped_stage import NOTHING
from thinpipe.pipeline.siblings import siblings_of


class LocalStage(LinkedStage):
    """A stage that hands outputs to the next stage and gradients to the previous one, if they are on this worker."""

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if self.links.forward_recv:
            self.neighbour(-1).get_fwd_send_ops(mb_index)
        else:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        if self.links.backward_send:
            self.get_bwd_send_ops(mb_index)
            return ()
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self.has_backward or not self.trains_here_or_before or self.links.backward_recv:
            return
        outputs, infos = self.fwd_cache[mb_index][0], self.grad_recv_info[mb_index]
        gradients = tuple(
            torch.zeros_like(output) if gradient is None and info.buffer is not None else gradient
            for gradient, output, info in zip(next_stage_bwd_outputs, outputs, infos, strict=True)
        )
        super().set_local_bwd_input(gradients, mb_index)

    def check_handed_over(self, infos: Sequence[Any], kind: Literal["forward", "backward"], chunk: int) -> None:
        """Raise RuntimeError if the neighbour has not handed over the tensors that a forward or backward needs."""
        if not any(info.buffer is NOTHING for info in infos):
            return
        is_forward = kind == "forward"
        other, what = (self.stage_index - 1, "outputs") if is_forward else (self.stage_index + 1, "gradients")
        send, hand_over = f"get_{kind[0]}wd_send_ops", f"set_local_{kind[0]}wd_input"
        raise RuntimeError(
            f"{kind} of stage {self.stage_index}, chunk {chunk}: stage {other} on the same worker has not handed over "
            f"its {what}. After each {kind}, a schedule calls {send} of the same stage or {hand_over} of its neighbour"
        )

    def neighbour(self, by: int) -> LocalStage:
        """Return the stage of this worker with an index that differs ``by`` that much."""
        index = self.stage_index + by
        (found,) = (each for each in siblings_of(self) if each.stage_index == index)
        assert isinstance(found, LocalStage)
        return found
