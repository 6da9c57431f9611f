"""thinpipe bench pipeline: pipelines compared with data-parallel and single-process training over emulated links."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import typer

from thinpipe.cli.machines import Machines
from thinpipe.cli.replicas import worker_errors
from thinpipe.cli.terminal import Outputs, one_line_errors, takes
from thinpipe.comm.shaping import list_facts
from thinpipe.lab.bench.inputs import PANELS
from thinpipe.lab.bench.models import Shapes
from thinpipe.lab.bench.pipeline.pipeline_options import PipelineBenchOptions
from thinpipe.lab.records import report
from thinpipe.lab.records.record import Record, Row
from thinpipe.options import read


@takes(Machines, PipelineBenchOptions, Shapes, Outputs, panels=PANELS)
def bench_pipeline(**given: Any) -> None:
    """Compare pipelines with data-parallel and single-process training.

    All train the same model on the same batch, with the steps of thinpipe train.
    Each run prints the lower bound of its step time and the fraction it reached;
    the bound is the larger of the busiest worker's compute time and the busiest
    link's transfer time with its delays. Lists are separated by commas; every
    combination is run.

    On several machines, on each: thinpipe bench pipeline --workers 3 --rank N
    --master HOST:PORT

    Example: thinpipe bench pipeline --model roberta --hidden 128 --tokens 64 --client-layers 4,4
    --link 10mbit,100mbit,1gbit,none --compress none,8bit,4bit
    """
    from thinpipe.lab.bench.pipeline.measuring import measure_all
    from thinpipe.lab.bench.pipeline.pipeline_columns import COLUMNS, KIND, compare
    from thinpipe.lab.bench.pipeline.pipeline_tables import plot_speed, result_tables

    with one_line_errors():
        settings = PipelineBenchOptions(shapes=Shapes(**read(Shapes, given)), **read(PipelineBenchOptions, given))
        outputs = Outputs(**read(Outputs, given))
        Machines(**read(Machines, given)).join(settings.workers[0] if len(settings.workers) == 1 else None)
        settings.check_here()
        outputs.check()
    with worker_errors():
        rows = compare(list(measure_all(settings, print_row, report_progress)))
    if not rows:
        return  # only worker 0 has the rows
    told = {**asdict(settings), "links": list_facts(settings.links), "device": str(settings.found_device)}
    config = {"command": ["thinpipe", *sys.argv[1:]], **told}
    record = Record(kind=KIND, config=config, columns=COLUMNS, rows=tuple(rows))
    tables = result_tables(rows)
    typer.echo(f"\n{report.summary(record)}")
    report.show(tables)
    outputs.save(record, tables, f"Pipelines: {settings.name}", plot_speed(rows, settings.name))


def print_row(row: Row) -> None:
    """Print a row as soon as it is measured; called by the first worker."""
    from thinpipe.lab.bench.pipeline.pipeline_tables import row_line

    print(row_line(row), flush=True)


def report_progress(line: str) -> None:
    """Print progress on stderr: a run may take hours; called by the first worker."""
    print(f"thinpipe: {line}", file=sys.stderr, flush=True)
