"""Terminal output of a training run: the plan, a progress bar or plain lines, and the results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from thinpipe.cli.terminal import duration
from thinpipe.lab.records import report
from thinpipe.lab.records.record import Record
from thinpipe.lab.records.report import Table
from thinpipe.lab.runs.run_tables import end_tables, plan_tables
from thinpipe.lab.runs.summary import KIND
from thinpipe.system.sanitize import printable
from thinpipe.train.checkpoints.best import LINK
from thinpipe.train.events import ChosenBits, Epoch, Finished, Listener, Plan, Step
from thinpipe.train.tasks.task import metric_text

LINE_EVERY_S = 10.0  # interval of progress lines in a pipe
WIDE = 72  # width of a full line about an epoch


class Terminal(Listener):
    """Shows a run: a progress bar on a terminal, lines without control characters in a pipe or a file."""

    def __init__(self, *, line_every_s: float = LINE_EVERY_S) -> None:
        self.line_every_s = line_every_s
        self._bar: Progress | None = None
        self._last_saved: tuple[int, str] | None = None

    def planned(self, plan: Plan) -> None:
        self.plan, self.pace = plan, Pace(plan)
        self.console = Console(highlight=False)
        self._print(report.summary(Record(kind=KIND, config={}, columns=(), rows=())))
        self._show(plan_tables(plan))
        if plan.first_step:
            self._print(f"goes on after step {plan.first_step} of {self.pace.total}")
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._print("")
            self._bar = self._start_bar()

    def stepped(self, step: Step) -> None:
        self.pace.add(step)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step.step, **self._bar_fields())
        elif time.monotonic() - self._printed_at >= self.line_every_s:
            pace = self.pace
            self._print(f"{pace.epoch_text()}  step {step.step}/{pace.total}  {pace.metrics()}  {pace.left()} left")

    def evaluated(self, epoch: Epoch) -> None:
        narrow = self.console.is_terminal and self.console.width < WIDE
        metric = metric_text(self.plan.metric, epoch.validation_metric)
        if epoch.bits_per_byte is not None:
            bits = "" if narrow else f"  {epoch.bits_per_byte:.3f} bits/byte"
            metrics = f"{self.plan.metric} {metric}{bits}"
        else:
            accuracy = "" if narrow else f"accuracy {epoch.train_accuracy:>6.1%}  "
            metrics = f"{accuracy}validation {metric:>6}"
        within = f"  step {epoch.step}" if epoch.step % self.plan.steps_per_epoch else ""
        self._print(
            f"epoch {epoch.epoch:>{len(str(self.plan.epochs))}}/{self.plan.epochs}{within}  loss {epoch.train_loss:.4f}"
            f"  {metrics}  {epoch.samples_per_s:.0f}/s  {epoch.seconds:.1f} s"
        )

    def bits_chosen(self, chosen: ChosenBits) -> None:
        each = ", ".join(f"stage {stages}: {bits}" for stages, bits in chosen.bits.items())
        one = set(chosen.bits.values())
        self._print(f"bits per value from step {chosen.step} on: {each if len(one) > 1 else one.pop()}")

    def noticed(self, line: str) -> None:
        typer.echo(f"thinpipe: {printable(line)}", err=True)

    def saved(self, step: int, path: str) -> None:
        self._last_saved = step, path

    def save_failed(self, step: int, problem: str) -> None:
        last = "there is none yet" if self._last_saved is None else f"the last one is {self._last_saved[1]}"
        typer.echo(f"thinpipe: no checkpoint of step {step}: {problem}; {last}", err=True)

    def finished(self, end: Finished) -> None:
        self._stop_bar()
        if not self.console.is_terminal:
            self._print("")
        self._show(end_tables(self.plan, end, self.pace.wire_bytes))
        if self._last_saved is not None:
            step, path = self._last_saved
            self._print(f"checkpoint of step {step}: {path}")
            if end.best_step not in (None, step):
                self._print(f"best checkpoint, of step {end.best_step}: {Path(path).parent / LINK}")
        if end.stopped_early:
            self._print(
                f"stopped early after step {self.pace.done} of {self.pace.total}: {self.plan.metric} is no better than "
                f"{metric_text(self.plan.metric, end.best_metric)} since {end.stopped_early} evaluations"
            )
        if end.exported:
            self._print(f"the model: {end.exported}")

    def failed(self, error: BaseException) -> None:
        """Restore the terminal and print the last step; the command prints the error and how to resume."""
        self._stop_bar()
        if hasattr(self, "pace"):  # a run may fail before ``planned``
            typer.echo(f"stopped after step {self.pace.done} of {self.pace.total}", err=True)

    def _print(self, line: str) -> None:
        if self.console.is_terminal:
            self.console.print(line, markup=False)
        else:
            _write(line)
        self._printed_at = time.monotonic()

    def _show(self, tables: Sequence[Table]) -> None:
        if self.console.is_terminal:
            report.show(tables, self.console)
        else:
            _write("\n".join(report.plain_text(table) for table in tables))

    def _start_bar(self) -> Progress:
        # Epoch, metrics and time take 64 columns; the bar gets the rest, and is omitted if that is too narrow.
        width = min(24, self.console.width - 64)
        bar = Progress(
            TextColumn("{task.fields[epoch]}", markup=False),
            *([BarColumn(bar_width=width)] if width >= 4 else []),
            TextColumn("{task.fields[metrics]}", markup=False),
            TextColumn("{task.fields[left]}", markup=False),
            console=self.console,
            transient=True,
        )
        bar.add_task("", total=self.pace.total, completed=self.pace.done, **self._bar_fields())
        bar.start()
        self.console.show_cursor(True)  # a killed worker could not restore it
        return bar

    def _bar_fields(self) -> dict[str, Any]:
        return {"epoch": self.pace.epoch_text(), "metrics": self.pace.metrics(), "left": f"{self.pace.left()} left"}

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Pace:
    """Means over the epoch so far, bytes since the start, and an estimate of the time left."""

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

    def metrics(self) -> str:
        """Return loss, accuracy, samples/s and MB sent in one line of constant layout."""
        if not self._samples:
            return "the first step"
        return (
            f"loss {self._loss / self._samples:.4f}  acc {self._accuracy / self._samples:>5.1%}  "
            f"{self._samples / max(self._seconds, 1e-9):.0f}/s  {_megabytes(self.wire_bytes)}"
        )

    def left(self) -> str:
        """Return the time left, with evaluation and saving at the mean rate so far."""
        steps = self.done - self.plan.first_step
        if not steps:
            return "-:--"
        return duration((time.monotonic() - self._began) / steps * (self.total - self.done))


def _megabytes(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:.1f} MB" if count_bytes < 100e6 else f"{count_bytes / 1e6:.0f} MB"


def _write(text: str) -> None:
    """Print to a pipe and flush; raise BrokenPipeError if it is closed, where rich would end the process."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Otherwise the exit of the process would flush the buffer, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
