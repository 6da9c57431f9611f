"""thinpipe train: the command and its options; the run itself is in thinpipe.train."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from thinpipe.cli.terminal import one_line_errors, takes
from thinpipe.codecs.recipes import RECIPES
from thinpipe.comm.membership import member
from thinpipe.options import option, read
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.settings import LINKS, MACHINES, OUT, PANELS, Settings
from thinpipe.train.shaping import link_facts
from thinpipe.train.tasks.tasks import task as find_task


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options of the command in addition to those of a run."""

    compress: str | None = option(
        f"Preset, {', '.join(RECIPES)}, or the codec of both directions, as in tile:4.",
        panel=LINKS,
        metavar="SPEC",
        shown="8bit; none for data",
        default=None,
    )
    log: Path | None = option("Folder for TensorBoard curves.", panel=OUT, metavar="DIR", default=None)
    json: Path | None = option(
        "File for the record; `thinpipe diff` compares two.", panel=OUT, metavar="FILE", default=None
    )
    rank: int | None = option("Rank of this worker; 0 is the client.", panel=MACHINES, metavar="N", default=None)
    master: str | None = option(
        "Address of worker 0, the same on all machines.", panel=MACHINES, metavar="HOST:PORT", default=None
    )
    debug: bool = option("Show tracebacks of errors.", panel=MACHINES, last=True, default=False)


@takes(Asked, Settings, RunOptions, Capture, panels=PANELS)
def train(**given: Any) -> None:
    """Train a model whose layers are on several workers.

    Prints the stages of all workers and the traffic of a step before training,
    and the results after it. Options that are left out are the task's recipe.

    On several machines, on each: thinpipe train ... --workers 3 --rank N
    --master HOST:PORT

    Example: thinpipe train --task digits --compress 4bit --epochs 10
    """
    asked = Asked(**read(Asked, given))
    if given["task"] is None and (given["model"] is not None or given["config"] is not None):
        given["task"] = "lm"  # the task that needs only a model
    # Imported here, so that --help is fast.
    from thinpipe.cli.train.listeners import make_listener
    from thinpipe.cli.train.preflight import preflight
    from thinpipe.cli.train.resolve import join_machines, resolve_run
    from thinpipe.cli.train.run import already_there, carry_out
    from thinpipe.train.data import check_possible

    if asked.debug:
        os.environ["THINPIPE_DEBUG"] = "1"
    with one_line_errors():
        join_machines(asked.rank, asked.master, given["workers"])
        settings, running = resolve_run(given)
    if already_there(running, given):
        return
    with one_line_errors():
        me, task = member(), find_task(settings.task)
        if me is None:  # on several machines the workers that read data check it
            check_possible(task, settings)
        if me is None or me.rank == 0:
            outputs = {name: getattr(running, name) for name in ("save", "trace", "export")}
            preflight(log=asked.log, json=asked.json, capture=given["capture"], **outputs)
    listener = partial(
        make_listener,
        config={"command": ["thinpipe", *sys.argv[1:]], **settings.to_json(), **link_facts(running.link)},
        seed=settings.seed,
        forward=settings.compress_forward,
        backward=settings.compress_backward,
        log=asked.log,
        json=asked.json,
    )
    code = carry_out(settings, running, listener)
    raise typer.Exit(code)
