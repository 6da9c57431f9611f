"""Location of the first non-finite value of a run: the step, the stage and the chunk.

Stages and replicas keep one sum of each chunk's values. The sums are read only if a step has a non-finite value.

Private names of torch used here, seen on 2.11 and 2.13: ``forward_maybe_with_nosync``, which runs the module, and
``bwd_cache``, the input gradients of each chunk; ``torch._foreach_norm``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from thinpipe.options import named
from thinpipe.pipeline.shaped_stage import TorchStage
from thinpipe.pipeline.stage import PipelineStage


class NonFiniteReport(TypedDict):
    """A report of non-finite values of one stage after a step; lists contain chunk numbers."""

    stage: int
    worker: int
    outputs: list[int]  # whose outputs were not finite
    losses: list[int]  # whose losses were not; only of the last stage
    input_gradients: list[int]  # whose gradients for the previous stage were not
    gradients: bool  # of parameters


class NotFiniteError(RuntimeError):
    """The run has produced NaN or infinity and cannot go on."""


def explain(step: int, loss: float, reports: Sequence[NonFiniteReport]) -> NotFiniteError:
    """Return the error that names the first place in order of computation: forward, then backward from the last stage.

    ``loss`` may be a stand-in where its value is not received: only whether it is finite matters.
    """
    forward = sorted(reports, key=lambda report: (report["stage"], report["worker"]))
    backward = sorted(reports, key=lambda report: (-report["stage"], report["worker"]))
    for kind, ordered in (("outputs", forward), ("losses", forward), ("input_gradients", backward)):
        for report in ordered:
            chunks: list[int] = report[kind]  # type: ignore[literal-required]
            if chunks:
                what = {"outputs": "output", "losses": "loss", "input_gradients": "gradient"}[kind]
                return _error(step, loss, f"the {what} of {_place(report)}, chunk {chunks[0]}")
    for report in backward:
        if report["gradients"]:
            return _error(step, loss, f"the gradients of {_place(report)}")
    return _error(step, loss, "no stage's outputs or gradients: in the loss itself")


def _place(report: NonFiniteReport) -> str:
    return f"stage {report['stage']} on worker {report['worker']}"


def _error(step: int, loss: float, where: str) -> NotFiniteError:
    what = "the loss is not finite" if not math.isfinite(loss) else "the loss is finite, but not the gradients"
    return NotFiniteError(
        f"stopped at step {step}: {what}. It first appeared in {where}. "
        + named("Try a smaller {lr}, more {warmup}, {clip_norm} 1, or a finer codec")
    )


class Checked(TorchStage):
    """A stage that sums each chunk's outputs and input gradients, and runs under autocast with ``amp``.

    This costs one cheap read, and does not synchronize with the device. A sum is finite unless one of its terms is not,
    or the sum overflows.
    """

    def __init__(self, *args: Any, amp: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.amp = amp
        self.output_sums: dict[int, Tensor] = {}  # by chunk, of the last step
        self.gradient_sums: dict[int, Tensor] = {}
        self._chunks_before = 0  # in earlier batches of the step

    def begin_batch(self, chunks_before: int) -> None:
        self._chunks_before = chunks_before

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.amp):
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.output_sums[self._chunks_before + fwd_chunk_id] = sum_of(
            output if isinstance(output, tuple) else (output,)
        )
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.gradient_sums[self._chunks_before + bwd_chunk_id] = sum_of(self.bwd_cache.get(bwd_chunk_id, ()))


class CheckedStage(Checked, PipelineStage):
    """The pipeline stage that the engine uses."""


def sum_of(values: Iterable[Any]) -> Tensor:
    """Return the sum of all floats in these tensors, in float32: half precision would overflow."""
    floats = [value.detach() for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return torch.stack([value.sum(dtype=torch.float32) for value in floats]).sum() if floats else torch.zeros(())


def not_finite(sums: dict[int, Tensor]) -> list[int]:
    """Return the chunks whose sums are not finite. Synchronizes with the device."""
    return sorted(chunk for chunk, total in sums.items() if not torch.isfinite(total))


def sum_of_squares(parameters: Iterable[nn.Parameter]) -> float:
    """Return the sum of squares of all gradients of one stage; not finite if one of them is not."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    norms: list[Tensor] = []
    for kind in dict.fromkeys(gradient.dtype for gradient in gradients):
        same = [gradient for gradient in gradients if gradient.dtype == kind]
        # Half precision would round the norm, or overflow. One call for all: a GPU waits for a launch per parameter.
        norms += torch._foreach_norm(same, dtype=torch.promote_types(kind, torch.float32))
    return float(torch.stack([norm.double() for norm in norms]).square().sum())
