"""Where a number that is not finite first appeared: the step, the stage, the chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

from thinpipe.options import named


class Suspicion(TypedDict):
    """What one worker knows about one of its stages after a step; lists are of chunks."""

    stage: int
    worker: int
    outputs: list[int]  # whose outputs were not finite
    losses: list[int]  # whose losses were not: of the last stage
    input_gradients: list[int]  # whose gradients for the stage before were not
    gradients: bool  # of parameters


class NotFiniteError(RuntimeError):
    """The run has produced NaN or infinity and cannot go on."""


def explain(step: int, loss: float, suspicions: Sequence[Suspicion]) -> NotFiniteError:
    """Names the first place in the order of computation: forward from the first stage on, then backward from the last.

    ``loss`` is NaN where this worker is not told the loss but knows that it was not finite.
    """
    forward = sorted(suspicions, key=lambda suspicion: (suspicion["stage"], suspicion["worker"]))
    backward = sorted(suspicions, key=lambda suspicion: (-suspicion["stage"], suspicion["worker"]))
    for kind, ordered in (("outputs", forward), ("losses", forward), ("input_gradients", backward)):
        for suspicion in ordered:
            chunks: list[int] = suspicion[kind]  # type: ignore[literal-required]
            if chunks:
                what = {"outputs": "output", "losses": "loss", "input_gradients": "gradient"}[kind]
                return _error(step, loss, f"the {what} of {_place(suspicion)}, chunk {chunks[0]}")
    for suspicion in backward:
        if suspicion["gradients"]:
            return _error(step, loss, f"the gradients of {_place(suspicion)}")
    return _error(step, loss, "no stage's outputs or gradients: in the loss itself")


def _place(suspicion: Suspicion) -> str:
    return f"stage {suspicion['stage']} on worker {suspicion['worker']}"


def _error(step: int, loss: float, where: str) -> NotFiniteError:
    what = "the loss is not finite" if not math.isfinite(loss) else "the loss is finite, but not the gradients"
    return NotFiniteError(
        f"stopped at step {step}: {what}. It first appeared in {where}. "
        + named("Try a smaller {lr}, more {warmup}, {clip_norm} 1, or a finer codec")
    )
