"""Curves of a run for TensorBoard; a resumed run goes on where the first one was broken off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thinpipe.training.events import Epoch, Finished, Plan, Step

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Curves:
    """Writes event files to a directory; the curves are on disk after every epoch."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._writer: SummaryWriter | None = None

    def planned(self, plan: Plan) -> None:
        # Imported here: it takes a second, and most runs write no curves.
        from torch.utils.tensorboard import SummaryWriter

        self.metric = plan.metric
        # What an earlier run drew after the checkpoint that this one goes on from is not part of the curve.
        purge_step = plan.first_step + 1 if plan.first_step else None
        self._writer = SummaryWriter(str(self.directory), purge_step=purge_step)

    def stepped(self, step: Step) -> None:
        self._add("train/loss", step.loss, step.step)
        self._add("train/accuracy", step.accuracy, step.step)
        self._add("train/lr", step.lr, step.step)
        if step.gradient_norm is not None:
            self._add("train/gradient_norm", step.gradient_norm, step.step)
        self._add("wire/bytes", step.wire_bytes, step.step)
        if step.seconds > 0:
            self._add("speed/samples_per_s", step.samples / step.seconds, step.step)

    def evaluated(self, epoch: Epoch) -> None:
        self._add("validation/loss", epoch.validation_loss, epoch.step)
        self._add(f"validation/{self.metric}", epoch.validation_metric, epoch.step)
        self._open().flush()

    def noticed(self, line: str) -> None:
        pass

    def saved(self, step: int, path: str) -> None:
        pass

    def save_failed(self, step: int, problem: str) -> None:
        pass

    def finished(self, end: Finished) -> None:
        self._open().close()

    def failed(self, error: BaseException) -> None:
        if self._writer is not None:  # a run may fail before there is a plan
            self._writer.close()

    def _add(self, name: str, value: float, step: int) -> None:
        self._open().add_scalar(name, value, step)

    def _open(self) -> SummaryWriter:
        assert self._writer is not None, "planned comes first"
        return self._writer
