"""One training step on one worker: forward, backward, an all-reduce of the step's statistics, and the update.

One sum over all workers carries all statistics of a step: the squared gradient norm of each stage, from which follow
the norm to clip by and whether all gradients are finite; whether the loss is finite; whether a worker received a stop
signal; whether the client's timer requests a checkpoint; bytes sent; unless the client has them itself, the loss and
the number of correct samples; and what ``auto_bits`` measures. The labels stay with the client.

Network delay counts only where a microbatch waits for it: receives for the sum are posted ahead and, before waiting for
it, those for the microbatches of the next step. So a worker has received the sum and updated its parameters by the time
the first microbatch that needs them can arrive.

Private name of torch used here, seen on 2.11 and 2.13: ``torch._foreach_mul_``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinpipe.comm.errors import StoppedTogether
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.finite import explain, sum_of_squares
from thinpipe.train.engines.world import World
from thinpipe.train.tasks.task import Batch

_EPSILON = 1e-6  # as torch's clip_grad_norm_: a norm of zero divides nothing


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """The result of a step; loss and correct are valid on the client only."""

    loss: float
    correct: float  # samples
    gradient_norm: float
    wire_bytes: int  # sent by all workers
    waited_s: float  # for the other workers
    save_due: bool = False  # all workers save after this step: the client's timer requests it
    stop: StoppedTogether | None = None  # to be raised once this step is saved: a worker received a stop signal
    pause: bool = False  # a worker asks all to run no further step
    shared: tuple[float, ...] = ()  # sums of the engine's shared numbers


def train_step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    *batches: Batch | None,
    step: int,
    clip_norm: float | None = None,
    interrupted: Callable[[], int] = lambda: 0,
    save_due: bool = False,
    pause: bool = False,
    another: bool = False,
) -> Stepped:
    """Apply one update for all of these batches.

    If a number is not finite, raise the same error on all workers, before the update.

    Args:
        interrupted: returns the signal that this worker received to stop, or 0; called once the gradients are computed.
        save_due: True if this worker, the client, requests a checkpoint after this step.
        pause: True if this worker asks all to run no further step.
        another: True if another step follows directly, so that its receives may be posted.
    """
    world, stages, sent = engine.world, engine.stage_count, engine.sent_bytes()
    statistics = world.control.expect_sum(stages + 7 + engine.shared.count)
    loss, correct = engine.compute(*batches)
    if another:
        engine.expect_step()
    squares = [0.0] * stages
    if engine.owns_state:
        for index, parameters in engine.stage_parameters.items():
            squares[index] = sum_of_squares(parameters)
    began = time.perf_counter()
    outcome, signal = (0.0, 0.0) if engine.client_has_outcome else (loss, correct), interrupted()
    flags = not math.isfinite(loss), bool(signal), save_due, pause
    statistics.send([*squares, *flags, engine.sent_bytes() - sent, *outcome, *engine.shared.numbers()])
    totals = statistics.result()
    waited_s = time.perf_counter() - began
    squares, (bad_loss, stop, save, paused, wire_bytes, *outcomes) = totals[:stages], totals[stages : stages + 7]
    if not engine.client_has_outcome:
        loss, correct = outcomes
    is_finite = not bad_loss and all(map(math.isfinite, squares))
    if another and (stop or paused or not is_finite):
        engine.cancel_prefetch()
    if not is_finite:
        non_finite_reports = [each for known in world.gather(engine.non_finite_reports()) for each in known]
        raise explain(step, float("nan") if bad_loss else 0.0, non_finite_reports)
    if clip_norm is not None:
        clip(engine.parameters(), norm_of(squares), clip_norm)
    with engine.updates.measure():
        _update(optimizer)
    return Stepped(
        loss=loss,
        correct=correct,
        gradient_norm=norm_of(squares),
        wire_bytes=round(wire_bytes),
        waited_s=waited_s,
        save_due=bool(save),
        stop=stop_request(world, signal) if stop else None,
        pause=bool(paused),
        shared=tuple(totals[stages + 7 :]),
    )


def bare_step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    """Run forward, backward and update only: no all-reduce of statistics, no synchronization with the device."""
    loss().backward()
    _update(optimizer)


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale one stage's gradients by the factor that brings ``norm``, over all stages, within ``limit``."""
    factor = limit / (norm + _EPSILON)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)


def norm_of(squares: Iterable[float]) -> float:
    """Return the gradient norm of all stages together, given the sum of squares of each."""
    return math.sqrt(math.fsum(squares))


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def stop_request(world: World, interrupted: int) -> StoppedTogether | None:
    """Return the first worker's signal to stop the run, if any; the same on all workers. A collective."""
    numbers = world.gather(interrupted)
    signalled = [(number, worker) for worker, number in enumerate(numbers) if number]
    if not signalled:
        return None
    number, worker = signalled[0]
    return StoppedTogether(number, worker=None if all(numbers) else worker)
