"""thinpipe ablate: execution of a plan's runs, and a comparison of their results."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

from thinpipe.cli.terminal import RESULTS, Outputs, duration, one_line_errors, progress_bar, takes
from thinpipe.lab.ablation import results, runner, views
from thinpipe.lab.ablation.plan import Plan, Run, read_plan
from thinpipe.lab.ablation.results import Result, Store
from thinpipe.lab.records import report
from thinpipe.options import OptionError, between, check, option, read

_WHICH, _HOW = "Which runs", "How they are run"
INTERRUPTED = 130  # exit code after Ctrl-C, by the convention of shells


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options of the command: the choice of runs, and their execution."""

    only: tuple[str, ...] = option(
        "Only runs whose name contains TEXT; repeatable. {dry_run} lists the names.",
        panel=_WHICH,
        metavar="TEXT",
        kind=list[str],
        parse=tuple,
        shown="all",
        default=(),
    )
    retry_failed: bool = option("Run failed runs again.", panel=_WHICH, default=False)
    dry_run: bool = option("List the runs and their options, and exit.", panel=_WHICH, default=False)
    jobs: int = option(
        "Number of runs at a time; they share the cores.", panel=_HOW, metavar="N", rule=between(1, 1000), default=1
    )
    set: tuple[str, ...] = option(
        "Option of thinpipe train for all runs, which overrides the plan; repeatable.",
        panel=_HOW,
        metavar="NAME=VALUE",
        kind=list[str],
        parse=tuple,
        shown="",
        default=(),
    )
    results: Path | None = option(
        "File that results are appended to.",
        panel=RESULTS,
        metavar="FILE",
        shown="PLAN.results.jsonl in this directory",
        default=None,
    )

    def __post_init__(self) -> None:
        check(self)


@takes(Asked, Outputs, panels=(_WHICH, _HOW, RESULTS))
def ablate(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN.toml", help="The plan: options and the values to combine.", show_default=False),
    ],
    **given: Any,
) -> None:
    """Train every combination of a plan, and compare the results.

    Each run is a thinpipe train in its own process; the tables show mean, spread
    and worst seed. Results are appended to a file as runs end, so the same
    command resumes where it stopped, and only prints the tables once all runs
    are done. Results of other settings stay in the file and are ignored.

    Exit code 0, 1 if a run failed, 2 for an invalid plan.

    Example: thinpipe ablate ablations/few_bits_digits.toml --jobs 2 --plot digits.png
    """
    with one_line_errors():
        asked, outputs = Asked(**read(Asked, given)), Outputs(**read(Outputs, given))
        wanted = read_plan(plan, resolve, asked.set)
        store = Store(asked.results or Path(f"{plan.stem}.results.jsonl"))
        chosen = [run for run in wanted.runs if not asked.only or any(map(run.matches, asked.only))]
        if not chosen:
            raise OptionError(
                f"no run has {' or '.join(map(repr, asked.only))} in its name; {{dry_run}} shows the names"
            )
        outputs.check()
        again = asked.retry_failed
        pending = [run for run in chosen if (result := store.get(run)) is None or (again and result.failed)]
        check_possible(plan, pending)
    if asked.dry_run:
        show_runs(wanted, chosen, pending, store)
        return
    _carry_out(wanted, chosen, pending, store, asked.jobs)
    _show_results(wanted, store, outputs)
    if any((result := store.get(run)) is not None and result.failed for run in chosen):
        typer.echo("thinpipe: runs failed; try them again with --retry-failed", err=True)
        raise typer.Exit(1)


def _carry_out(wanted: Plan, chosen: Sequence[Run], pending: Sequence[Run], store: Store, jobs: int) -> None:
    """Run all pending runs, until all are done or a signal interrupts."""
    progress = Progress(wanted, chosen, pending, store, jobs)
    try:
        with ExitStack() as stack:
            with one_line_errors():
                stack.enter_context(store.locked())
            stack.enter_context(interrupts_told())
            stack.enter_context(progress)
            runner.compile_kernels(pending)
            for result in stack.enter_context(closing(runner.carry_out(pending, jobs=jobs, report=progress.under_way))):
                store.append(result)
                progress.ended(result)
    except KeyboardInterrupt:
        left = sum(store.get(run) is None for run in chosen)
        typer.echo(
            f"thinpipe: interrupted; {len(chosen) - left} of {len(chosen)} runs are in {store.path}. "
            f"Go on with the same command:\n  {shlex.join(['thinpipe', *sys.argv[1:]])}",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None


def _show_results(wanted: Plan, store: Store, outputs: Outputs) -> None:
    found = results.methods(wanted.runs, store)
    config = {"command": ["thinpipe", *sys.argv[1:]], "title": wanted.title, **wanted.fixed}
    record = results.to_record(found, config)
    tables = views.result_tables(found, sum(store.get(run) is None for run in wanted.runs))
    typer.echo(report.summary(record))
    report.show(tables)
    outputs.save(record, tables, wanted.title, views.plot_metric_against_bits(wanted.title, found))


def resolve(options: dict[str, Any]) -> Any:
    """Return the settings that thinpipe train resolves from these options; raise its OptionError."""
    from thinpipe.train.resolve import resolve_run

    return resolve_run(options, here=False)[0]  # results may come from another machine


def check_possible(plan: Path, runs: Sequence[Run]) -> None:
    """Raise ValueError for the first run that thinpipe train would reject: no data, no GPU, too many workers."""
    from thinpipe.train import data
    from thinpipe.train.running import check_devices
    from thinpipe.train.settings import Settings
    from thinpipe.train.tasks.tasks import task

    seen: set[str] = set()
    for run in runs:
        settings = Settings.from_json({"threads": None, **{k: v for k, v in run.settings.items() if k != "steps"}})
        asked = repr((settings.task, settings.source, settings.parallel, settings.workers, settings.layout,
                      settings.client_layers, settings.batch_size, settings.device))  # fmt: skip
        if asked in seen:  # codecs and seeds make no difference, and checking data sets is slow
            continue
        seen.add(asked)
        try:
            check_devices(settings)
            data.check_possible(task(settings.task), settings)
        except ValueError as error:
            raise ValueError(f"{plan}: the run {run.name!r}: {error}") from None


@contextmanager
def interrupts_told() -> Iterator[None]:
    """Handle SIGINT and SIGTERM inside: print a message, then raise KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        os.write(2, b"\nthinpipe: ending the runs under way; once more ends them at once\n")  # signal-safe
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, interrupt)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def show_runs(plan: Plan, chosen: Sequence[Run], pending: Sequence[Run], store: Store) -> None:
    """Print each chosen run: its number in the plan, state, name, and training command."""
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
    """Progress on stderr: a bar with the time left on a terminal, elsewhere a line per finished run.

    Without a bar, active runs are reported, too.
    """

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

    def under_way(self, line: str) -> None:
        """Report an active run, if there is no bar."""
        if self._bar.disable:
            self._say(line)

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
        """Print a line above the bar, if there is one."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _sharing(pending: Sequence[Run], jobs: int) -> str:
    processes = max(map(runner.processes_of, pending))
    threads = min(runner.threads_of(run, jobs) for run in pending)
    each = f"{processes} process{'es' * (processes > 1)} each"
    text = f"{jobs} at a time, {each}, OMP_NUM_THREADS={threads}, {runner.cores()} cores"
    return text if jobs * processes * threads <= runner.cores() else f"{text}: they have to share, and speeds suffer"


def _outcome(result: Result) -> str:
    if result.figures is None:
        return f"failed: {result.error}"
    return f"{result.metric} {format(result.figures['metric'], result.metric_format)}, {result.wall_s:.0f} s"
