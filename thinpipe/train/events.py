"""Events that a run reports to its listeners: the plan, every step, every epoch, the end.

The loop calls a ``Listener`` on the client alone; progress bars, log lines, curves and records are listeners. A
listener never changes the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from thinpipe.pipeline.report import LinkReport
from thinpipe.system.files import OutputError
from thinpipe.train.engines.plan import Holding, LinkPlan
from thinpipe.train.tasks.task import Metric

Parallel = Literal["pipeline", "data", "none"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run, known before its first step."""

    task: str
    metric: Metric
    parallel: Parallel
    workers: int
    chunks: int
    batch_size: int
    epochs: int
    steps_per_epoch: int
    first_step: int  # 0, or where a resumed run continues
    last_step: int  # where this run ends: after all epochs, or before
    evaluate_every: int | None  # steps, in addition to the end of an epoch
    train_samples: int
    validation_samples: int
    parameters: int
    trained: int  # of them
    holdings: tuple[Holding, ...]
    links: tuple[LinkPlan, ...]  # of a batch; empty unless parallel is pipeline
    accumulate: int = 1  # batches per step
    tokens: int | None = None  # per sample, padding included; None for images
    schedule: str | None = None  # of a pipeline, with the number of chunks in flight if the links determined it


@dataclass(frozen=True, kw_only=True)
class Step:
    """One completed training step."""

    step: int  # from 1, over all epochs
    epoch: int  # from 1
    samples: int
    loss: float
    accuracy: float  # of this batch, 0 to 1
    lr: float
    gradient_norm: float | None  # of all stages together; None without gradient clipping
    wire_bytes: int  # sent by all workers in this step
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ChosenBits:
    """The bits per value of the links where they are chosen in training."""

    step: int  # the first one with them
    bits: Mapping[str, int]  # by the stages of a link, as in "0 to 1"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch, or the part of it that was done at its evaluation."""

    epoch: int  # from 1
    step: int
    train_loss: float
    train_accuracy: float
    validation_loss: float
    validation_metric: float  # named by Plan.metric
    samples_per_s: float  # of training, without evaluation and saving
    seconds: float  # wall time, evaluation and saving included
    bits_per_byte: float | None = None  # of the validation part, where it is text


@dataclass(frozen=True, kw_only=True)
class WorkerUse:
    """Totals of one worker over the run's training steps."""

    worker: int
    stages: tuple[int, ...]
    compute_ms: float  # total of the steps, less encoding, decoding, waiting and transfer
    peak_mib: float


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The result of a run after its last step."""

    steps: int  # of this run, without those before it resumed
    metric: float  # of the last evaluation
    best_metric: float
    validation_loss: float
    train_loss: float
    samples_per_s: float
    seconds: float
    workers: tuple[WorkerUse, ...]
    links: tuple[LinkReport, ...]  # over the run's training steps
    bits_per_byte: float | None = None  # of the last evaluation, where it was of text
    parameters_sha256: str = ""  # of all parameters and buffers: equal if two runs ended bit-identical
    best_step: int | None = None  # of the checkpoint that is kept as the best
    stopped_early: int = 0  # evaluations without a better metric that ended the run; 0: it has all its steps
    exported: str = ""  # folder of the exported model, if there is one


class Listener:
    """An observer of a run, on the client. A subclass defines the methods of the events that it needs."""

    def planned(self, plan: Plan) -> None: ...

    def stepped(self, step: Step) -> None: ...

    def evaluated(self, epoch: Epoch) -> None: ...

    def bits_chosen(self, chosen: ChosenBits) -> None:
        """Receive the bits at the start of a run, and whenever they change."""
        ...

    def noticed(self, line: str) -> None:
        """Receive a notice for the user about the start or resumption of the run; called before ``planned``."""
        ...

    def saved(self, step: int, path: str) -> None: ...

    def save_failed(self, step: int, problem: str) -> None:
        """Receive the reason why there is no checkpoint of this step; the run continues."""
        ...

    def finished(self, end: Finished) -> None: ...

    def failed(self, error: BaseException) -> None: ...


class Listeners(Listener):
    """Several listeners as one.

    A full disk or a closed pipe does not end the run: the listener that failed is removed, with a line on stderr.
    Errors of a disk before the first step and at the end are raised after all other listeners were called: at the end
    as an OutputError, with all listeners removed, since the run itself has not failed.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = list(listeners)

    def planned(self, plan: Plan) -> None:
        for error in self._call(lambda each: each.planned(plan)):
            if not isinstance(error, BrokenPipeError):
                raise error

    def stepped(self, step: Step) -> None:
        self._call(lambda each: each.stepped(step))

    def evaluated(self, epoch: Epoch) -> None:
        self._call(lambda each: each.evaluated(epoch))

    def bits_chosen(self, chosen: ChosenBits) -> None:
        self._call(lambda each: each.bits_chosen(chosen))

    def noticed(self, line: str) -> None:
        self._call(lambda each: each.noticed(line))

    def saved(self, step: int, path: str) -> None:
        self._call(lambda each: each.saved(step, path))

    def save_failed(self, step: int, problem: str) -> None:
        self._call(lambda each: each.save_failed(step, problem))

    def finished(self, end: Finished) -> None:
        lost = self._call(lambda each: each.finished(end), last=True)
        self.listeners = []
        if lost:
            raise OutputError("; ".join(error.strerror or str(error) for error in lost))

    def failed(self, error: BaseException) -> None:
        self._call(lambda each: each.failed(error))

    def _call(self, call: Callable[[Listener], None], *, last: bool = False) -> list[OSError]:
        lost = []
        for each in list(self.listeners):
            try:
                call(each)
            except OSError as error:
                self.listeners.remove(each)
                lost.append(error)
                if not last:
                    print(f"thinpipe: {type(each).__name__} stops, the run does not: {error}", file=sys.stderr)
        return lost
