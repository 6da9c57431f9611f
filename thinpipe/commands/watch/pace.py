"""How a run is going: the figures of a progress bar and of the lines that stand for it in a pipe."""

from __future__ import annotations

import time

from thinpipe.training.events import Plan, Step


class Pace:
    """Means over the epoch so far, bytes since the start, and the time that is left at this speed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.total = plan.last_step
        self.done = plan.first_step
        self.wire_bytes = 0
        self.epoch = min(plan.first_step // max(plan.steps_per_epoch, 1) + 1, plan.epochs)
        self._began = time.monotonic()
        self._samples, self._loss, self._accuracy, self._seconds = 0, 0.0, 0.0, 0.0

    def add(self, step: Step) -> None:
        if step.epoch != self.epoch:
            self.epoch = step.epoch
            self._samples, self._loss, self._accuracy, self._seconds = 0, 0.0, 0.0, 0.0
        self.done = step.step
        self.wire_bytes += step.wire_bytes
        self._samples += step.samples
        self._loss += step.loss * step.samples
        self._accuracy += step.accuracy * step.samples
        self._seconds += step.seconds

    def epoch_text(self) -> str:
        return f"epoch {self.epoch:>{len(str(self.plan.epochs))}}/{self.plan.epochs}"

    def figures(self) -> str:
        """Loss, accuracy, samples/s, MB sent: one line, aligned from step to step."""
        if not self._samples:
            return "the first step"
        return (
            f"loss {self._loss / self._samples:.4f}  acc {self._accuracy / self._samples:>5.1%}  "
            f"{self._samples / max(self._seconds, 1e-9):.0f}/s  {megabytes(self.wire_bytes)}"
        )

    def left(self) -> str:
        """Time left, evaluation and saving included, as they were so far."""
        steps = self.done - self.plan.first_step
        if not steps:
            return "-:--"
        return duration((time.monotonic() - self._began) / steps * (self.total - self.done))


def duration(seconds: float) -> str:
    """``1:05`` or ``2:03:04``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def megabytes(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:.1f} MB" if count_bytes < 100e6 else f"{count_bytes / 1e6:.0f} MB"
