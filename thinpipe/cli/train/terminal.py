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
from thinpipe.cli.train.record import KIND, columns, make_result, metric_text, step_parts
from thinpipe.lab.records import report
from thinpipe.lab.records.record import Column, Record, Row, columns_of, row_of
from thinpipe.lab.records.report import Table
from thinpipe.lab.records.step_times import StepTimes
from thinpipe.system.sanitize import printable
from thinpipe.train.checkpoints.best import LINK
from thinpipe.train.events import Epoch, Finished, Holding, LinkPlan, LinkUse, Plan, Step

LINE_EVERY_S = 10.0  # interval of progress lines in a pipe
SHORT_RUN = 4  # runs of at most this many times the steps before the PCA basis is known get a note on those steps
WIDE = 72  # width of a full line about an epoch
_WORKER = Column(name="worker", heading="worker", key=True)
_HOLDING_COLUMNS = (
    Column(name="stage", heading="stage", key=True),
    _WORKER,
    Column(name="units", heading="units", key=True),
    Column(name="parameters", heading="parameters", format=",d"),
    Column(name="share", heading="share", format=".1%"),
)
_TRAINED_COLUMN = Column(name="trained", heading="of these\ntrained", format=",d")
_LINK_COLUMNS = (
    Column(name="link", heading="stages", key=True),
    Column(name="direction", heading="direction", key=True),
    Column(name="codec", heading="codec", key=True),
    Column(name="tensors", heading="a chunk's\ntensors"),
    Column(name="tensor_kb", heading="tensors\nkB", format=".1f"),
    Column(name="wire_kb", heading="wire\nkB", format=".1f"),
    Column(name="wire_ratio", heading="wire\nratio", format=".3f"),
)
_PART_COLUMNS = (*columns_of(StepTimes), Column(name="peak_mib", heading="peak\nMiB", format=".0f"))
_PART_NOTES = {
    "pipeline": "wait: for a sender that has nothing to send yet.\ntransfer: as much of it as computing does not hide.",
    "data": "compute: and the exchange of gradients, which runs beside it.",
    "none": "",
}


class Terminal:
    """Shows a run: a progress bar on a terminal, lines without control characters in a pipe or a file."""

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
        typer.echo(f"thinpipe: {printable(line)}", err=True)

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
            if end.best_step not in (None, step):
                self._say(f"best checkpoint, of step {end.best_step}: {Path(path).parent / LINK}")
        if end.exported:
            self._say(f"the model: {end.exported}")

    def failed(self, error: BaseException) -> None:
        """Restore the terminal and print the last step; the command prints the error and how to resume."""
        self._stop_bar()
        if hasattr(self, "pace"):  # a run may fail before ``planned``
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
        # Epoch, metrics and time take 64 columns; the bar gets the rest, and is omitted if that is too narrow.
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
        self.console.show_cursor(True)  # a killed worker could not restore it
        return bar

    def _bar_fields(self) -> dict[str, Any]:
        return {"epoch": self.pace.epoch_text(), "figures": self.pace.figures(), "left": f"{self.pace.left()} left"}

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

    def figures(self) -> str:
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


def plan_tables(plan: Plan) -> list[Table]:
    """Return the tables of stages and, if there are any, of links."""
    rows = [
        {
            "stage": str(holding.stage),
            "worker": _worker_name(plan, holding.worker),
            "units": _unit_range(holding),
            "parameters": holding.parameters,
            "share": holding.parameters / max(plan.parameters, 1),
            "trained": holding.trained,
        }
        for holding in plan.holdings
    ]
    frozen = plan.trained < plan.parameters
    columns = (*_HOLDING_COLUMNS, _TRAINED_COLUMN) if frozen else _HOLDING_COLUMNS
    tables = [Table(title=_title(plan), columns=columns, rows=rows)]
    if plan.links:
        links = [_link_row(link) | {"tensors": _shapes_text(link)} for link in plan.links]
        tables.append(
            Table(title=f"What travels per {_per(plan)}", columns=_LINK_COLUMNS, rows=links, note=_plan_notes(plan))
        )
    return tables


def end_tables(plan: Plan, end: Finished, wire_bytes: int) -> list[Table]:
    """Return the tables of results, traffic and times by part; ``wire_bytes`` is the sum over workers and steps."""
    result = make_result(plan, end, wire_bytes=wire_bytes)
    tables = [Table(title="Result", columns=columns(result, plan), rows=[row_of(result)])]
    if end.links:
        links = [*(_link_row(link, steps=end.steps) for link in end.links), *_sums(end)]
        tables.append(Table(title="What travelled per step", columns=_LINK_COLUMNS, rows=links))
    tables.append(
        Table(
            title="Where the time of a step goes",
            columns=(_WORKER, *_PART_COLUMNS),
            rows=worker_rows(plan, end),
            note=_PART_NOTES[plan.parallel],
        )
    )
    return tables


def worker_rows(plan: Plan, end: Finished) -> list[Row]:
    """Return the parts of a step on each worker."""
    return [
        {
            "worker": _worker_name(plan, worker.worker),
            **row_of(step_parts(end, worker)),
            "peak_mib": worker.peak_mib,
        }
        for worker in end.workers
    ]


def _title(plan: Plan) -> str:
    workers = f"{plan.workers} worker" + "s" * (plan.workers != 1)
    how = {"pipeline": f"pipeline of {workers}", "data": f"data-parallel, {workers}", "none": "one process"}
    order = f", {plan.schedule}" if plan.schedule not in (None, "gpipe") else ""
    chunks = f" in {plan.chunks} chunks{order}" if plan.parallel == "pipeline" else ""
    steps = f", {plan.accumulate} to a step" if plan.accumulate > 1 else ""
    trained = f", {plan.trained:,} of them trained" if plan.trained < plan.parameters else ""
    return (
        f"{plan.task}: {how[plan.parallel]}, {plan.parameters:,} parameters{trained}\n"
        f"{plan.train_samples} samples to train on, {plan.validation_samples} to validate; "
        f"batches of {plan.batch_size}{chunks}{steps}"
    )


def _per(plan: Plan) -> str:
    """Return the unit of the traffic of links."""
    return "step" if plan.accumulate == 1 else "batch"


def _worker_name(plan: Plan, worker: int) -> str:
    """Return a worker's number, marked as the client if it has several stages (client-server layout)."""
    stages = [holding for holding in plan.holdings if holding.worker == worker]
    return f"{worker}, client" if plan.parallel == "pipeline" and len(stages) > 1 else str(worker)


def _unit_range(holding: Holding) -> str:
    """Return the numbers of the units, and the names of the first and the last: ``1-18 Stem to Head``."""
    first, last = holding.first_unit, holding.first_unit + holding.units - 1
    numbers = f"{first}" if first == last else f"{first}-{last}"
    return f"{numbers} {' to '.join(dict.fromkeys((holding.unit_names[0], holding.unit_names[-1])))}"


def _shapes_text(link: LinkPlan) -> str:
    return " + ".join("x".join(map(str, shape)) for shape in link.shapes)


def _plan_notes(plan: Plan) -> str:
    """Return the notes on links, as lines.

    They report gradients that are not needed, bytes of the first steps, floats that are not compressed, and integers,
    such as masks, that may need fewer bytes than the table shows.
    """
    notes = []
    back = {(link.target, link.source) for link in plan.links}
    silent = [f"{link.target} to {link.source}" for link in plan.links if (link.source, link.target) not in back]
    if silent:
        notes.append(f"No gradients from stage {', '.join(silent)}: nothing that they would reach is trained.")
    more = [link for link in plan.links if link.first_wire_bytes is not None]
    if more:
        first_kb = sum(link.first_wire_bytes or 0 for link in more) / 1e3
        again_kb = sum(link.wire_bytes for link in more) / 1e3
        learned_kb = sum(link.learned_bytes for link in more) / 1e3
        first_steps = max(link.first_steps for link in more)
        until = f"in the first {first_steps} steps" if learned_kb else "while samples are new"
        then = f", of which {learned_kb:.1f} kB tell axes, every so many steps." if learned_kb else "."
        notes.append(
            f"{more[0].spec}: {first_kb:.1f} kB a {_per(plan)} forward {until}, {again_kb:.1f} kB after that{then}"
        )
        notes += _first_steps_notes(plan, first_steps, max(link.first_bits for link in more))
    for reason in dict.fromkeys(link.uncompressed for link in plan.links if link.uncompressed):
        links = ", ".join(f"{link.source} to {link.target}" for link in plan.links if link.uncompressed == reason)
        notes.append(f"Nothing is compressed from stage {links}: {reason}.")
    integer_kb = sum(link.integer_bytes for link in plan.links) / 1e3
    if integer_kb:
        notes.append(
            f"At most: {integer_kb:.1f} kB of it are masks or other integers, which travel in as few bits as they need."
        )
    return "\n".join(notes)


def _first_steps_notes(plan: Plan, first_steps: int, bits: int) -> list[str]:
    """Return a note on the part of a short run that uses more bits than its codec; links count batches, not steps."""
    batches, before = plan.last_step * plan.accumulate, plan.first_step * plan.accumulate
    if before >= first_steps or batches > SHORT_RUN * first_steps:
        return []
    unit = "steps" if plan.accumulate == 1 else "batches"
    first = f"the first {min(first_steps, batches)} of {batches} {unit}"
    return [f"The activations of {first} travel at {bits} bits, before axes are known."]


def _link_row(link: LinkPlan | LinkUse, steps: int = 1) -> dict[str, object]:
    return {
        "link": f"{link.source} to {link.target}",
        "direction": link.direction,
        "codec": link.spec,
        **_traffic(link.tensor_bytes, link.wire_bytes, steps),
    }


def _sums(end: Finished) -> list[Row]:
    """Return the sums over all links by direction, for comparing runs; none for a direction with one link."""
    sums: list[Row] = []
    for direction in ("forward", "backward"):
        links = [link for link in end.links if link.direction == direction]
        if len(links) > 1:
            sums.append({"link": "all", "direction": direction, "codec": "", **_total(links, end.steps)})
    return sums


def _total(links: Sequence[LinkUse], steps: int) -> dict[str, float | None]:
    return _traffic(sum(link.tensor_bytes for link in links), sum(link.wire_bytes for link in links), steps)


def _traffic(tensor_bytes: int, wire_bytes: int, steps: int) -> dict[str, float | None]:
    steps = max(steps, 1)
    ratio = wire_bytes / tensor_bytes if tensor_bytes else None
    return {"tensor_kb": tensor_bytes / steps / 1e3, "wire_kb": wire_bytes / steps / 1e3, "wire_ratio": ratio}
