"""thinpipe plan: the command and its options; the planner is thinpipe.lab.plan."""

from __future__ import annotations

import sys
from typing import Any

import typer

from thinpipe.cli.replicas import worker_errors
from thinpipe.cli.terminal import Outputs, one_line_errors, takes
from thinpipe.lab.plan.plan_options import PlanOptions
from thinpipe.options import options_of, read
from thinpipe.train.settings import Settings, Trained
from thinpipe.train.tasks.panels import PANELS

_OF_RUN = ("batch_size", "epochs", "optimizer", "momentum", "amp", "threads")


@takes(
    PlanOptions,
    Trained,
    [each for each in options_of(Settings).values() if each.name in _OF_RUN],
    Outputs,
    panels=PANELS,
)
def plan(**given: Any) -> None:
    """Predict whether a pipeline pays, and how to set it up.

    Searches layout, order of machines, cuts, schedule, microbatches and codecs
    by simulating the step that `thinpipe train` takes, and compares with one
    process and with data-parallel training. Prints the verdict first.

    --cluster describes the machines; without it they are measured here.
    `thinpipe train --plan FILE` runs the plan that --json has written.

    Example: thinpipe plan --config llama --cluster two-homes --json plan.json
    """
    from thinpipe.lab.plan.planning import make_plan

    with one_line_errors(), worker_errors():
        options, outputs = PlanOptions(**read(PlanOptions, given)), Outputs(**read(Outputs, given))
        outputs.check()
        chosen = {*_OF_RUN, *(each.name for each in options_of(Trained).values())}
        made = make_plan(options, {name: value for name, value in given.items() if name in chosen})
    for line in made.lines():
        typer.echo(line)
    record = made.record(["thinpipe", *sys.argv[1:]])
    if options.picture is not None:
        with one_line_errors():
            made.draw(options.picture)
        typer.echo(f"wrote {options.picture}", err=True)
    outputs.save(record, [made.table()], f"Plan for {made.name}")
