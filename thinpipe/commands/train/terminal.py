"""What a person at the client sees of a run: tables, one progress bar or plain lines, a line per epoch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from thinpipe.commands.terminal import duration
from thinpipe.commands.train.record import KIND, metric_text
from thinpipe.commands.train.tables import end_tables, plan_tables
from thinpipe.measure import report
from thinpipe.measure.record import Record
from thinpipe.training.events import Epoch, Finished, Plan, Step

LINE_EVERY_S = 10.0  # in a pipe, between the lines of epochs
WIDE = 72  # columns that a whole line about an epoch takes


class Terminal:
    """Shows a run: a bar where somebody watches, lines without control characters in a pipe or a file."""

    def __init__(self, *, line_every_s: float = LINE_EVERY_S) -> None:
        self.line_every_s = line_every_s
        self._bar: Progress | None = None
        self._last_saved: tuple[int, str] | None = None

    def planned(self, plan: Plan) -> None:
        self.plan, self.pace = plan, Pace(plan)
        self.console = Console(highlight=False)
        self._say(report.summary(Record(kind=KIND, config={}, columns=(), rows=())))
        self._show(plan_tables(plan))
        if plan.first_step:
            self._say(f"goes on after step {plan.first_step} of {self.pace.total}")
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._say("")
            self._bar = self._start_bar()

    def stepped(self, step: Step) -> None:
        self.pace.add(step)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step.step, **self._bar_fields())
        elif time.monotonic() - self._said_at >= self.line_every_s:
            pace = self.pace
            self._say(f"{pace.epoch_text()}  step {step.step}/{pace.total}  {pace.figures()}  {pace.left()} left")

    def evaluated(self, epoch: Epoch) -> None:
        narrow = self.console.is_terminal and self.console.width < WIDE
        metric = metric_text(self.plan.metric, epoch.validation_metric)
        if epoch.bits_per_byte is not None:
            bits = "" if narrow else f"  {epoch.bits_per_byte:.3f} bits/byte"
            figures = f"{self.plan.metric} {metric}{bits}"
        else:
            accuracy = "" if narrow else f"accuracy {epoch.train_accuracy:>6.1%}  "
            figures = f"{accuracy}validation {metric:>6}"
        within = f"  step {epoch.step}" if epoch.step % self.plan.steps_per_epoch else ""
        self._say(
            f"epoch {epoch.epoch:>{len(str(self.plan.epochs))}}/{self.plan.epochs}{within}  loss {epoch.train_loss:.4f}"
            f"  {figures}  {epoch.samples_per_s:.0f}/s  {epoch.seconds:.1f} s"
        )

    def noticed(self, line: str) -> None:
        typer.echo(f"thinpipe: {line}", err=True)

    def saved(self, step: int, path: str) -> None:
        self._last_saved = step, path

    def save_failed(self, step: int, problem: str) -> None:
        last = "there is none yet" if self._last_saved is None else f"the last one is {self._last_saved[1]}"
        typer.echo(f"thinpipe: no checkpoint of step {step}: {problem}; {last}", err=True)

    def finished(self, end: Finished) -> None:
        self._stop_bar()
        if not self.console.is_terminal:
            self._say("")
        self._show(end_tables(self.plan, end, self.pace.wire_bytes))
        if self._last_saved is not None:
            step, path = self._last_saved
            self._say(f"checkpoint of step {step}: {path}")
        if end.exported:
            self._say(f"the model: {end.exported}")

    def failed(self, error: BaseException) -> None:
        """Leave the terminal as it was and say where the run got to; why, and how to go on, the command tells."""
        self._stop_bar()
        if hasattr(self, "pace"):  # a run may fail before there is a plan
            typer.echo(f"stopped after step {self.pace.done} of {self.pace.total}", err=True)

    def _say(self, line: str) -> None:
        if self.console.is_terminal:
            self.console.print(line, markup=False)
        else:
            _write(line)
        self._said_at = time.monotonic()

    def _show(self, tables: Sequence[report.Table]) -> None:
        if self.console.is_terminal:
            report.show(tables, self.console)
        else:
            _write("\n".join(report.plain_text(table) for table in tables))

    def _start_bar(self) -> Progress:
        # Epoch, figures and time take 64 columns; the bar gets what is left, and goes where that is nothing.
        room = min(24, self.console.width - 64)
        bar = Progress(
            TextColumn("{task.fields[epoch]}", markup=False),
            *([BarColumn(bar_width=room)] if room >= 4 else []),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn("{task.fields[left]}", markup=False),
            console=self.console,
            transient=True,
        )
        bar.add_task("", total=self.pace.total, completed=self.pace.done, **self._bar_fields())
        bar.start()
        self.console.show_cursor(True)  # a worker that is killed could not bring it back
        return bar

    def _bar_fields(self) -> dict[str, Any]:
        return {"epoch": self.pace.epoch_text(), "figures": self.pace.figures(), "left": f"{self.pace.left()} left"}

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


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
            f"{self._samples / max(self._seconds, 1e-9):.0f}/s  {_megabytes(self.wire_bytes)}"
        )

    def left(self) -> str:
        """Time left, evaluation and saving included, as they were so far."""
        steps = self.done - self.plan.first_step
        if not steps:
            return "-:--"
        return duration((time.monotonic() - self._began) / steps * (self.total - self.done))


def _megabytes(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:.1f} MB" if count_bytes < 100e6 else f"{count_bytes / 1e6:.0f} MB"


def _write(text: str) -> None:
    """Print to a pipe, at once: it is read while the run goes on. Rich would end the process when nobody reads it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What could not be written must not be tried again, and fail again, when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
