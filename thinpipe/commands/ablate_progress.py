"""What an ablation shows of itself: the list of its runs, and how far it is, as a bar or as lines."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from types import TracebackType

import typer

from thinpipe.ablation.plan import Plan, Run
from thinpipe.ablation.runner import cores, threads_of
from thinpipe.ablation.store import Result, Store
from thinpipe.commands.terminal import duration, progress_bar


def show_runs(plan: Plan, chosen: Sequence[Run], pending: Sequence[Run], store: Store) -> None:
    """Every chosen run: number in the plan, state, name, and the command that trains it."""
    numbers = {run.identity: number for number, run in enumerate(plan.runs, 1)}
    waiting = {run.identity for run in pending}
    width = len(str(len(plan.runs)))
    typer.echo(f"{plan.title}: {len(chosen)} runs, {len(pending)} to do, results in {store.path}")
    for run in chosen:
        result = store.get(run)
        state = "pending" if run.identity in waiting else "failed" if result and result.failed else "done"
        typer.echo(f"{numbers[run.identity]:>{width}}  {state:7}  {run.name}")
        typer.echo(f"{'':{width}}           thinpipe train {shlex.join(run.arguments())}")


class Progress:
    """On a terminal a bar with the time left; elsewhere a line for each run that ends. Both on stderr."""

    def __init__(self, plan: Plan, chosen: Sequence[Run], pending: Sequence[Run], store: Store, jobs: int) -> None:
        self.pending, self.jobs = len(pending), min(jobs, max(len(pending), 1))
        self.count = self.failed = 0
        self._bar = progress_bar()
        there = len(chosen) - len(pending)
        self._say(f"{plan.title}: {len(pending)} runs to do, {there} there already, results in {store.path}")
        if others := store.others(plan.runs):
            self._say(f"{others} results in it are of other settings than the plan's, and are left out")
        if store.damaged:
            self._say(f"{store.damaged} damaged lines in it are left out")
        if pending:
            self._say(_sharing(pending, self.jobs))

    def __enter__(self) -> Progress:
        self.started = time.monotonic()
        self._bar.start()
        self._task = self._bar.add_task(f"0 of {self.pending}", total=self.pending)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def ended(self, result: Result) -> None:
        self.count += 1
        self.failed += result.failed
        line = f"[{self.count:>{len(str(self.pending))}}/{self.pending}] {result.name}: {_outcome(result)}"
        if result.failed or self._bar.disable:
            self._say(line)
        failed = f", {self.failed} failed" if self.failed else ""
        left = duration((time.monotonic() - self.started) / self.count * (self.pending - self.count))
        said = f"{self.count} of {self.pending}{failed}, {left} left; {result.name}: {_outcome(result)}"
        self._bar.update(self._task, completed=self.count, description=said)

    def _say(self, line: str) -> None:
        """Above the bar, where there is one."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _sharing(pending: Sequence[Run], jobs: int) -> str:
    workers = max(int(run.settings["workers"]) for run in pending)
    threads = min(threads_of(run, jobs) for run in pending)
    text = f"{jobs} at a time, {workers} workers each, OMP_NUM_THREADS={threads}, {cores()} cores"
    return text if jobs * workers * threads <= cores() else f"{text}: they have to share, and speeds suffer"


def _outcome(result: Result) -> str:
    if result.figures is None:
        return f"failed: {result.error}"
    return f"{result.metric} {format(result.figures['metric'], result.metric_format)}, {result.wall_s:.0f} s"
