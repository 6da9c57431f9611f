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
from typing import Annotated, Any

import typer

from thinpipe.cli.terminal import RESULTS, Outputs, duration, one_line_errors, progress_bar, takes
from thinpipe.lab.ablation import results, runner, summary
from thinpipe.lab.ablation.plan import Plan, Run, read_plan
from thinpipe.lab.ablation.results import Result, Store
from thinpipe.lab.records import report
from thinpipe.options import OptionError, between, check, option, read

_WHICH, _HOW = "Which runs", "How they are run"


@dataclass(frozen=True, kw_only=True)
class AblateOptions:
    """The choice of runs, and their execution."""

    only: tuple[str, ...] = option(
        "Only runs whose name contains TEXT; repeatable. {dry_run} lists the names.",
        panel=_WHICH,
        metavar="TEXT",
        kind=list[str],
        parse=tuple,
        default_text="all",
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
        default_text="",
        default=(),
    )
    results: Path | None = option(
        "File that results are appended to.",
        panel=RESULTS,
        metavar="FILE",
        default_text="PLAN.results.jsonl in this directory",
        default=None,
    )

    def __post_init__(self) -> None:
        check(self)


@takes(AblateOptions, Outputs, panels=(_WHICH, _HOW, RESULTS))
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
        options, outputs = AblateOptions(**read(AblateOptions, given)), Outputs(**read(Outputs, given))
        expanded = read_plan(plan, resolve, options.set)
        store = Store(options.results or Path(f"{plan.stem}.results.jsonl"))
        chosen = [run for run in expanded.runs if not options.only or any(map(run.matches, options.only))]
        if not chosen:
            raise OptionError(
                f"no run has {' or '.join(map(repr, options.only))} in its name; {{dry_run}} shows the names"
            )
        outputs.check()
        retry = options.retry_failed
        pending = [run for run in chosen if (result := store.get(run)) is None or (retry and result.failed)]
        runner.check_possible(plan, pending)
    if options.dry_run:
        show_runs(expanded, chosen, pending, store)
        return
    _carry_out(AblationProgress(expanded, chosen, pending, store, options.jobs), pending, store)
    found = results.methods(expanded.runs, store)
    config = {"command": ["thinpipe", *sys.argv[1:]], "title": expanded.title, **expanded.fixed}
    record = results.to_record(found, config)
    tables = summary.result_tables(found, sum(store.get(run) is None for run in expanded.runs))
    typer.echo(report.summary(record))
    report.show(tables)
    outputs.save(record, tables, expanded.title, summary.plot_metric_against_bits(expanded.title, found))
    if any((result := store.get(run)) is not None and result.failed for run in chosen):
        typer.echo("thinpipe: runs failed; try them again with --retry-failed", err=True)
        raise typer.Exit(1)


def resolve(options: dict[str, Any]) -> Any:
    """Return the settings that thinpipe train resolves from these options; raise its OptionError."""
    from thinpipe.train.resolve import resolve_run

    return resolve_run(options, here=False)[0]  # results may come from another machine


def _carry_out(progress: AblationProgress, pending: Sequence[Run], store: Store) -> None:
    """Run all pending runs, until all are done or a signal interrupts."""
    try:
        with ExitStack() as stack:
            with one_line_errors():
                stack.enter_context(store.locked())
            stack.enter_context(interruptible())
            stack.enter_context(progress.bar)
            runner.compile_kernels(pending)
            ended = runner.carry_out(pending, jobs=progress.jobs, report=progress.running)
            for result in stack.enter_context(closing(ended)):
                store.append(result)
                progress.ended(result)
    except KeyboardInterrupt:
        done = sum(store.get(run) is not None for run in progress.chosen)
        typer.echo(
            f"thinpipe: interrupted; {done} of {len(progress.chosen)} runs are in {store.path}. "
            f"Go on with the same command:\n  {shlex.join(['thinpipe', *sys.argv[1:]])}",
            err=True,
        )
        raise typer.Exit(130) from None  # after Ctrl-C, by the convention of shells


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a message and KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        os.write(2, b"\nthinpipe: ending the active runs; interrupt again to end them at once\n")  # signal-safe
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


class AblationProgress:
    """Progress on stderr: a bar with the time left on a terminal, elsewhere a line per finished run.

    Without a bar, active runs are reported, too.
    """

    def __init__(self, plan: Plan, chosen: Sequence[Run], pending: Sequence[Run], store: Store, jobs: int) -> None:
        self.chosen = chosen
        self.pending, self.jobs = len(pending), min(jobs, max(len(pending), 1))
        self.count = self.failed = 0
        self.started, self.bar = time.monotonic(), progress_bar()
        self._task = self.bar.add_task(f"0 of {self.pending}", total=self.pending)
        done = len(chosen) - len(pending)
        self._print(f"{plan.title}: {len(pending)} runs to do, {done} already done, results in {store.path}")
        if others := store.others(plan.runs):
            self._print(f"{others} results in it have other settings than the plan, and are ignored")
        if store.damaged:
            self._print(f"{store.damaged} damaged lines in it are ignored")
        if pending:
            self._print(runner.load_text(pending, self.jobs))

    def running(self, line: str) -> None:
        """Report an active run, if there is no bar."""
        if self.bar.disable:
            self._print(line)

    def ended(self, result: Result) -> None:
        self.count += 1
        self.failed += result.failed
        outcome = f"{result.name}: {result.outcome}"
        if result.failed or self.bar.disable:
            self._print(f"[{self.count:>{len(str(self.pending))}}/{self.pending}] {outcome}")
        failed = f", {self.failed} failed" if self.failed else ""
        left = duration((time.monotonic() - self.started) / self.count * (self.pending - self.count))
        description = f"{self.count} of {self.pending}{failed}, {left} left; {outcome}"
        self.bar.update(self._task, completed=self.count, description=description)

    def _print(self, line: str) -> None:
        """Print a line above the bar, if there is one."""
        self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
