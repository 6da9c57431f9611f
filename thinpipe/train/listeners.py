"""Listeners of a training run that record numbers: TensorBoard curves, and the base class of trackers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from thinpipe.train.events import Epoch, Finished, Listener, Plan, Step
from thinpipe.train.tasks.task import Metric

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
