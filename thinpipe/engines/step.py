"""One step of training on one worker: forward, backward, a word with the others, and the update.

All a step's words travel in one sum over all workers: the squares of each stage's gradients, which give the norm to
clip by and tell whether all are finite; whether the loss is; whether somebody wants to stop; bytes; and, unless the
client has them itself, the loss and how many were right. What the client knows of its labels stays with it.

A network's delay counts only where a chunk waits for it: everybody says in advance that the words are expected, and,
before waiting for them, that the chunks of the next step are. So a worker has heard all words, and updated its
parameters, by the time the first chunk that needs them can be there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinpipe.engines.engine import Engine
from thinpipe.engines.finite import explain, sum_of_squares
from thinpipe.workers.errors import StoppedTogether
from thinpipe.workloads.task import Batch

_EPSILON = 1e-6  # as torch's clip_grad_norm_: a norm of zero divides nothing


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """What a step came to; loss and correct are the client's to know."""

    loss: float
    correct: float  # samples
    gradient_norm: float
    wire_bytes: int  # sent by all workers
    waited_s: float  # for the others


def train_step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    *batches: Batch | None,
    step: int,
    clip_norm: float | None = None,
    interrupted: int = 0,
    another: bool = False,
) -> Stepped:
    """One update after all of these batches.

    Raises the same error on all workers if a number is not finite or one was asked to end; ``interrupted`` is the
    number of the signal that asked this one, or 0. ``another``: the next thing that workers do is another step.
    """
    world, stages, sent = engine.world, engine.stage_count, engine.sent_bytes()
    words = world.expect_sum(stages + 5)
    loss, correct = engine.compute(*batches)
    if another:
        engine.expect_step()
    squares = [0.0] * stages
    if engine.owns_state:
        for index, parameters in engine.stage_parameters().items():
            squares[index] = sum_of_squares(parameters)
    began = time.perf_counter()
    told = (0.0, 0.0) if engine.client_has_outcome else (loss, correct)
    words.tell([*squares, not math.isfinite(loss), bool(interrupted), engine.sent_bytes() - sent, *told])
    heard = words.heard()
    waited_s = time.perf_counter() - began
    squares, (bad_loss, stop, wire_bytes, *outcome) = heard[:stages], heard[stages:]
    if not engine.client_has_outcome:
        loss, correct = outcome
    is_finite = not bad_loss and all(map(math.isfinite, squares))
    if another and (stop or not is_finite):
        engine.call_off()
    if not is_finite:
        suspicions = [each for known in world.gather(engine.suspicions()) for each in known]
        raise explain(step, float("nan") if bad_loss else 0.0, suspicions)
    if stop:
        raise _interruption(world.gather(interrupted))
    norm = norm_of(squares)
    if clip_norm is not None:
        clip(engine.parameters(), norm, clip_norm)
    with engine.updates.measure():
        _update(optimizer)
    return Stepped(loss=loss, correct=correct, gradient_norm=norm, wire_bytes=round(wire_bytes), waited_s=waited_s)


def bare_step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    """Forward, backward and update alone: no word with the others, and nothing that waits for a GPU."""
    loss().backward()
    _update(optimizer)


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale one stage's gradients, given the norm of those of all stages, so that the latter is within the limit."""
    factor = limit / (norm + _EPSILON)
    if factor < 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def norm_of(squares: Iterable[float]) -> float:
    """Of all stages together, given the sum of squares of each."""
    return math.sqrt(math.fsum(squares))


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _interruption(numbers: list[int]) -> StoppedTogether:
    """What asked the run to end: the first worker's signal, of which all are told."""
    worker, number = next((worker, number) for worker, number in enumerate(numbers) if number)
    return StoppedTogether(number, worker=None if all(numbers) else worker)
