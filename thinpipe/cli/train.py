"""thinpipe train: the command and its options; the run itself is in thinpipe.train."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinpipe.cli.command_runner import CommandOptions, is_client, resolving
from thinpipe.cli.terminal import one_line_errors, takes
from thinpipe.codecs.recipes import ADAPTIVE_RANGE, RECIPES
from thinpipe.comm.membership import is_served, member
from thinpipe.train.events import Listener
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.shaping import link_facts
from thinpipe.train.tasks.panels import PANELS, link_option, output_option, stage_option
from thinpipe.train.trackers import TRACKERS, check_installed, parse_trackers

if TYPE_CHECKING:
    from thinpipe.lab.plan.plan_file import PlanFile


@dataclass(frozen=True, kw_only=True)
class TrainOptions(CommandOptions):
    """Options of the command in addition to those of a run."""

    compress: str | None = link_option(
        f"Preset, {', '.join(RECIPES)}; {ADAPTIVE_RANGE} for as many of 2 to 8 bits as links carry without slowing "
        "steps, chosen in training; or the codec of both directions, as in tile:4.",
        metavar="SPEC",
        default_text="8bit; none for data",
        default=None,
    )
    log: Path | None = output_option("Folder for TensorBoard curves.", metavar="DIR", default=None)
    plan: Path | None = stage_option(
        "Run the plan of a record of `thinpipe plan --json`; other options win over the plan's.",
        metavar="FILE.json",
        default=None,
    )
    report_to: tuple[str, ...] = output_option(
        f"Experiment trackers: {', '.join(TRACKERS)}; a list.",
        metavar="NAME,...",
        kind=str,
        parse=parse_trackers,
        default_text="none",
        advanced=True,
        default=(),
    )
    save_config: Path | None = output_option(
        "Write all options of this run to a file, for `thinpipe train FILE.yaml`.",
        metavar="FILE.yaml",
        advanced=True,
        default=None,
    )


_KINDS = (TrainOptions, Settings, RunOptions, Capture)


@takes(*_KINDS, panels=PANELS)
def train(
    config_file: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.yaml", help="Options by their long names; the command line wins."),
    ] = None,
    **given: Any,
) -> None:
    """Train a model whose layers are on several workers.

    Prints the stages of all workers and the traffic of a step before training,
    and the results after it. Options that are left out have the task's defaults.

    On several machines: thinpipe serve --listen HOST:PORT on each server, then
    thinpipe train ... --servers TICKET,TICKET. On a trusted network also, on
    each: thinpipe train ... --workers 3 --rank N --master HOST:PORT

    Example: thinpipe train --task digits --compress 4bit --epochs 10
    """
    # Imported here, so that --help is fast.
    from thinpipe.cli.training import already_there, run_with_restarts
    from thinpipe.lab.netem.network import check_launch
    from thinpipe.train.config_file import merge, read_config, write_config
    from thinpipe.train.data import check_possible
    from thinpipe.train.preflight import preflight
    from thinpipe.train.resolve import resolve_run
    from thinpipe.train.tasks.tasks import task as find_task

    if config_file is not None:
        with one_line_errors():
            given = merge(read_config(config_file, _KINDS), given)
    plan = None
    if given["plan"] is not None:
        from thinpipe.lab.plan.plan_file import read_plan

        with one_line_errors():
            plan = read_plan(given["plan"])
            given = merge(plan.options, given)
    with resolving(TrainOptions, given) as options:
        settings, running = resolve_run(given)
        check_launch([settings.workers], [running.link])
    if already_there(settings, running, given):
        return
    with one_line_errors():
        task = find_task(settings.task)
        if member() is None or is_served():  # on several machines the workers that read data check it
            check_possible(task, settings)
        if is_client():
            check_installed(options.report_to)
            capture = None if running.capture is None else running.capture.path
            outputs = {"log": options.log, "save": running.save, "json": options.json, "trace": running.trace}
            preflight(**outputs, capture=capture, export=running.export, save_config=options.save_config)
    if options.save_config is not None and is_client():
        write_config(options.save_config, _KINDS, settings, running, given)
    raise typer.Exit(run_with_restarts(settings, running, make_listener(options, settings, running, plan)))


def make_listener(
    options: TrainOptions, settings: Settings, running: RunOptions, plan: PlanFile | None = None
) -> Callable[[], Listener]:
    """Return a picklable function that makes the client's listener: the terminal, curves and a record."""
    config = {"command": ["thinpipe", *sys.argv[1:]], **settings.to_json(), **link_facts(running.link)}
    specs = {"forward": settings.compress_forward, "backward": settings.compress_backward}
    if plan is not None:
        config["predicted_samples_per_s"] = plan.samples_per_s
    facts: dict[str, Any] = {"config": config, "seed": settings.seed, **specs}
    return partial(listen, options.log, options.json, report_to=options.report_to, plan=plan, **facts)


def listen(
    log: Path | None,
    json: Path | None,
    *,
    report_to: Sequence[str] = (),
    plan: PlanFile | None = None,
    **facts: Any,
) -> Listener:
    """Return the listener of a run; ``facts`` are the arguments of ``RecordFile``."""
    from thinpipe.cli.run_terminal import Terminal
    from thinpipe.lab.plan.plan_file import Comparison
    from thinpipe.lab.runs.summary import RecordFile
    from thinpipe.train.events import Listeners
    from thinpipe.train.listeners import Curves
    from thinpipe.train.trackers import Trackers

    return Listeners(
        [
            Terminal(),
            *([] if plan is None else [Comparison(plan)]),
            *([] if log is None else [Curves(log)]),
            *([Trackers(report_to, facts["config"])] if report_to else []),
            *([] if json is None else [RecordFile(json, **facts)]),
        ]
    )
