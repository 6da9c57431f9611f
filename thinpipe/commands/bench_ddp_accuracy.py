"""thinpipe bench ddp-accuracy: whether compressed gradients cost accuracy."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from thinpipe.bench.ddp.digits import Recipe, compare_accuracy, mean_table
from thinpipe.bench.inputs import parse_codecs
from thinpipe.commands.replicas import check_workers, run_replicas
from thinpipe.commands.terminal import Outputs, one_line_errors
from thinpipe.measure import report

_WHAT, _HOW, _RESULTS = "What is compared", "How it is trained", "What comes out"


def bench_ddp_accuracy(
    codecs: Annotated[
        str,
        typer.Option(
            metavar="SPEC,...",
            help="Codecs by their specs, separated by commas. Every other one is held against none.",
            rich_help_panel=_WHAT,
        ),
    ] = "none,uniform:8",
    error_feedback: Annotated[
        bool, typer.Option(help="Add what was lost to the next gradient.", rich_help_panel=_WHAT)
    ] = True,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Trainings of each.", rich_help_panel=_HOW)] = 3,
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Of 1437 images.", rich_help_panel=_HOW)] = 20,
    batch_size: Annotated[
        int, typer.Option(min=1, max=1437, metavar="N", help="Of all replicas together.", rich_help_panel=_HOW)
    ] = 64,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Replicas to start on this machine. Under torchrun: leave it out.",
            rich_help_panel=_HOW,
            show_default="2",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep every training.", rich_help_panel=_RESULTS)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the tables as a page.", rich_help_panel=_RESULTS)
    ] = None,
) -> None:
    """Whether compressed gradients cost accuracy.

    Trains a small network on scikit-learn's digits with DistributedDataParallel,
    once per codec and seed, and counts the bytes. Half a minute on two cores.
    Exit code 1 if a codec loses more than a point against none.

    Example: thinpipe bench ddp-accuracy --codecs none,uniform:8,sort:4
    """
    outputs = Outputs(json=json, markdown=markdown)
    with one_line_errors():
        specs = tuple(each.spec for each in parse_codecs(codecs))
        if find_spec("sklearn") is None:
            raise ValueError("the digits come from scikit-learn, which is missing: pip install scikit-learn")
        outputs.check()
        count = check_workers(workers, "cpu")
        replicas = count or int(os.environ["WORLD_SIZE"])
        if batch_size % replicas:
            raise ValueError(f"--batch-size is shared evenly: a multiple of {replicas} replicas, not {batch_size}")
    recipe = Recipe(codecs=specs, seeds=seeds, epochs=epochs, batch_size=batch_size, error_feedback=error_feedback)
    record = run_replicas(compare_accuracy, recipe, ["thinpipe", *sys.argv[1:]], workers=count)
    if record is None:
        return
    tables = [mean_table(record.rows), *([report.check_table(record.checks)] if record.checks else [])]
    typer.echo(report.summary(record))
    report.show(tables)
    outputs.save(record, tables, "Accuracy with compressed gradients")
    if not all(check.passed for check in record.checks):
        raise typer.Exit(1)
