"""thinpipe ablate: a plan's runs carried out, and what they say side by side."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinpipe.commands.terminal import Outputs, one_line_errors

if TYPE_CHECKING:
    from thinpipe.ablation.plan import Run

_WHICH, _HOW, _RESULTS = "Which runs", "How they are run", "What comes out"
INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended


def ablate(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="What to vary.", show_default=False)],
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Those whose name has this in it; repeat for several. --dry-run shows the names.",
            rich_help_panel=_WHICH,
            show_default="all",
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run those again that failed.", rich_help_panel=_WHICH)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and what they are started with.", rich_help_panel=_WHICH)
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs at a time; they share the cores.", rich_help_panel=_HOW)
    ] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="An option of thinpipe train for all runs, before what the plan says; repeat for several.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where results are added as runs end.",
            rich_help_panel=_RESULTS,
            show_default="PLAN.results.jsonl in this directory",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The record, for thinpipe diff.", rich_help_panel=_RESULTS)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the tables as a page.", rich_help_panel=_RESULTS)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the metric against bits per value.", rich_help_panel=_RESULTS),
    ] = None,
) -> None:
    """Train every combination of a plan; tables of mean, spread and worst seed.

    Each run is a thinpipe train in its own process. Results are added to a file
    as runs end, so the same command, given again, goes on where it stopped, and
    only shows the tables when all are there. Results of other settings stay in
    the file and are left out.

    Exit code 0, 1 if a run failed, 2 for a plan that makes no sense.

    Example: thinpipe ablate ablations/digits.toml --jobs 2 --plot digits.png
    """
    # Not at the top: the other verbs need not wait for what training needs.
    from thinpipe.ablation import rows, runner, views
    from thinpipe.ablation.plan import read_plan
    from thinpipe.ablation.store import Store
    from thinpipe.commands.ablate_progress import Progress, show_runs
    from thinpipe.measure import report

    outputs = Outputs(json=json, markdown=markdown, plot=plot)
    with one_line_errors():
        wanted = read_plan(plan, settle, set_ or [])
        store = Store(results or Path(f"{plan.stem}.results.jsonl"))
        chosen = [run for run in wanted.runs if not only or any(map(run.matches, only))]
        if not chosen:
            raise ValueError(f"no run has {' or '.join(map(repr, only or []))} in its name; --dry-run shows the names")
        outputs.check()
        pending = [run for run in chosen if (result := store.get(run)) is None or (retry_failed and result.failed)]
        check_possible(plan, pending)
    if dry_run:
        show_runs(wanted, chosen, pending, store)
        return

    progress = Progress(wanted, chosen, pending, store, jobs)
    try:
        with ExitStack() as stack:
            with one_line_errors():
                stack.enter_context(store.locked())
            stack.enter_context(interrupts_told())
            stack.enter_context(progress)
            runner.compile_kernels(pending)
            for result in stack.enter_context(closing(runner.carry_out(pending, jobs=jobs))):
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

    found = rows.methods(wanted.runs, store)
    config = {"command": ["thinpipe", *sys.argv[1:]], "title": wanted.title, **wanted.fixed}
    record = rows.to_record(found, config)
    tables = views.result_tables(found, sum(store.get(run) is None for run in wanted.runs))
    typer.echo(report.summary(record))
    report.show(tables)
    outputs.save(record, tables, wanted.title, views.plot_metric_against_bits(wanted.title, found))
    if any((result := store.get(run)) is not None and result.failed for run in chosen):
        typer.echo("thinpipe: runs failed; try them again with --retry-failed", err=True)
        raise typer.Exit(1)


def settle(options: dict[str, Any]) -> Any:
    """What thinpipe train would make of these options; its OptionError if it would refuse them."""
    from thinpipe.commands.train.settle import settle_run

    return settle_run(options)[0]


def check_possible(plan: Path, runs: Sequence[Run]) -> None:
    """ValueError for the first run that thinpipe train would refuse: no data, too many workers for the model."""
    from thinpipe.training import data
    from thinpipe.training.settings import Settings
    from thinpipe.workloads.tasks import task

    seen: set[str] = set()
    for run in runs:
        settings = Settings.from_json({"threads": None, **{k: v for k, v in run.settings.items() if k != "steps"}})
        asked = repr((settings.task, settings.source, settings.parallel, settings.workers, settings.layout,
                      settings.client_layers, settings.batch_size))  # fmt: skip
        if asked in seen:  # codecs and seeds make no difference, and data sets take a while to look for
            continue
        seen.add(asked)
        try:
            data.check_possible(task(settings.task), settings)
        except ValueError as error:
            raise ValueError(f"{plan}: the run {run.name!r}: {error}") from None


@contextmanager
def interrupts_told() -> Iterator[None]:
    """Inside, Ctrl-C says what it does before it does it, and being told to end (SIGTERM) is the same."""

    def interrupt(*_: object) -> None:
        os.write(2, b"\nthinpipe: ending the runs under way; once more ends them at once\n")  # safe in a handler
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, interrupt)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
