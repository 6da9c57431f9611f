"""Listeners of a training run: several as one, and TensorBoard curves."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinpipe.system.files import OutputError
from thinpipe.train.events import Epoch, Finished, Listener, Plan, Step
from thinpipe.train.tasks.task import Metric

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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


class ScalarListener(Listener, ABC):
    """A listener that records numbers by name and step."""

    metric: Metric

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""

    def stepped(self, step: Step) -> None:
        values = {"train/loss": step.loss, "train/accuracy": step.accuracy, "train/lr": step.lr}
        if step.gradient_norm is not None:
            values["train/gradient_norm"] = step.gradient_norm
        values["wire/bytes"] = step.wire_bytes
        if step.seconds > 0:
            values["speed/samples_per_s"] = step.samples / step.seconds
        self.log(values, step.step)

    def evaluated(self, epoch: Epoch) -> None:
        values = {"validation/loss": epoch.validation_loss, f"validation/{self.metric}": epoch.validation_metric}
        if epoch.bits_per_byte is not None:
            values["validation/bits_per_byte"] = epoch.bits_per_byte
        self.log(values, epoch.step)


class Curves(ScalarListener):
    """TensorBoard curves, flushed after each epoch; a resumed run continues the curves of the first one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._writer: SummaryWriter | None = None

    def planned(self, plan: Plan) -> None:
        # Imported here: it takes a second, and most runs write no curves.
        from torch.utils.tensorboard import SummaryWriter

        self.metric = plan.metric
        # Remove the points that the earlier run wrote after the checkpoint from which this run resumes.
        purge_step = plan.first_step + 1 if plan.first_step else None
        self._writer = SummaryWriter(str(self.directory), purge_step=purge_step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._open().add_scalar(name, value, step)

    def evaluated(self, epoch: Epoch) -> None:
        super().evaluated(epoch)
        self._open().flush()

    def finished(self, end: Finished) -> None:
        self._open().close()

    def failed(self, error: BaseException) -> None:
        if self._writer is not None:  # a run may fail before ``planned``
            self._writer.close()

    def _open(self) -> SummaryWriter:
        assert self._writer is not None, "planned comes first"
        return self._writer
