"""thinpipe train: the command and its options; the run itself is in thinpipe.train."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from thinpipe.cli.command_runner import CommandOptions, is_client, resolving
from thinpipe.cli.terminal import one_line_errors, takes
from thinpipe.codecs.recipes import RECIPES
from thinpipe.comm.membership import is_served, member
from thinpipe.train.events import Listener
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.shaping import link_facts
from thinpipe.train.tasks.panels import PANELS, link_option, output_option


@dataclass(frozen=True, kw_only=True)
class TrainOptions(CommandOptions):
    """Options of the command in addition to those of a run."""

    compress: str | None = link_option(
        f"Preset, {', '.join(RECIPES)}, or the codec of both directions, as in tile:4.",
        metavar="SPEC",
        shown="8bit; none for data",
        default=None,
    )
    log: Path | None = output_option("Folder for TensorBoard curves.", metavar="DIR", default=None)


@takes(TrainOptions, Settings, RunOptions, Capture, panels=PANELS)
def train(**given: Any) -> None:
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
    from thinpipe.train.data import check_possible
    from thinpipe.train.preflight import preflight
    from thinpipe.train.resolve import resolve_run
    from thinpipe.train.tasks.tasks import task as find_task

    with resolving(TrainOptions, given) as options:
        settings, running = resolve_run(given)
        check_launch([settings.workers], [running.link])
    if already_there(running, given):
        return
    with one_line_errors():
        task = find_task(settings.task)
        if member() is None or is_served():  # on several machines the workers that read data check it
            check_possible(task, settings)
        if is_client():
            capture = None if running.capture is None else running.capture.path
            outputs = {"log": options.log, "save": running.save, "json": options.json, "trace": running.trace}
            preflight(**outputs, capture=capture, export=running.export)
    raise typer.Exit(run_with_restarts(settings, running, make_listener(options, settings, running)))


def make_listener(options: TrainOptions, settings: Settings, running: RunOptions) -> Callable[[], Listener]:
    """Return a picklable function that makes the client's listener: the terminal, curves and a record."""
    config = {"command": ["thinpipe", *sys.argv[1:]], **settings.to_json(), **link_facts(running.link)}
    specs = {"forward": settings.compress_forward, "backward": settings.compress_backward}
    return partial(listen, options.log, options.json, config=config, seed=settings.seed, **specs)


def listen(log: Path | None, json: Path | None, **facts: Any) -> Listener:
    """Return the listener of a run; ``facts`` are the arguments of ``RecordFile``."""
    from thinpipe.cli.run_terminal import Terminal
    from thinpipe.lab.runs.summary import RecordFile
    from thinpipe.train.listeners import Curves, Listeners

    return Listeners(
        [
            Terminal(),
            *([] if log is None else [Curves(log)]),
            *([] if json is None else [RecordFile(json, **facts)]),
        ]
    )
