"""thinpipe bench pipeline: pipelines against data-parallel and single-process training, over links of any rate."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from thinpipe.bench.models import CUTTABLE, Shapes
from thinpipe.codecs.spec import split_specs
from thinpipe.commands.replicas import worker_errors
from thinpipe.commands.terminal import Outputs, one_line_errors
from thinpipe.measure import report
from thinpipe.measure.record import Record, Row
from thinpipe.workers.network import parse_links

_WHAT, _HOW, _RESULTS = "What is trained", "How it is trained", "What comes out"


def bench_pipeline(
    model: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(CUTTABLE)}.", rich_help_panel=_WHAT)
    ] = "roberta",
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Samples per step, of all workers.", rich_help_panel=_WHAT)
    ] = 32,
    image_size: Annotated[
        int, typer.Option(min=32, metavar="PIXELS", help="Width and height of images.", rich_help_panel=_WHAT)
    ] = 224,
    width: Annotated[
        float, typer.Option(min=0.05, help="Channels of models of images, published = 1.", rich_help_panel=_WHAT)
    ] = 1.0,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Length of texts.", rich_help_panel=_WHAT)] = 128,
    hidden: Annotated[
        int | None,
        typer.Option(
            min=8,
            metavar="N",
            help="Hidden size of roberta and mlp.",
            show_default="768; mlp 1024",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Layers of roberta and mlp.", show_default="12; mlp 4", rich_help_panel=_WHAT
        ),
    ] = None,
    workers: Annotated[str, typer.Option(metavar="N,...", help="1 is a single process.", rich_help_panel=_HOW)] = "1,2",
    parallel: Annotated[
        str,
        typer.Option(
            metavar="WAY,...",
            help="none: a single process. data: DistributedDataParallel, the batch shared among workers. pipeline.",
            rich_help_panel=_HOW,
        ),
    ] = "none,data,pipeline",
    layout: Annotated[
        str, typer.Option(metavar="NAME,...", help="linear, client-server.", rich_help_panel=_HOW)
    ] = "client-server",
    schedule: Annotated[str, typer.Option(metavar="NAME,...", help="gpipe, 1f1b.", rich_help_panel=_HOW)] = "gpipe",
    chunks: Annotated[
        str, typer.Option(metavar="N,...", help="Parts that a batch is cut into.", rich_help_panel=_HOW)
    ] = "8",
    compress: Annotated[
        str,
        typer.Option(metavar="SPEC,...", help="Codecs of both directions, or 8bit, 4bit, 2bit.", rich_help_panel=_HOW),
    ] = "none,8bit",
    stage: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="thinpipe; torch: its own stage, uncompressed.", rich_help_panel=_HOW),
    ] = "thinpipe",
    client_layers: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST,LAST",
            help="Units that the client keeps at both ends.",
            show_default="balanced by measured cost",
            rich_help_panel=_HOW,
        ),
    ] = None,
    link: Annotated[
        str,
        typer.Option(
            metavar="RATE,...",
            help="Workers in network namespaces with links of this rate, as in 10mbit,100mbit,1gbit; needs root. "
            "none: as the machine is.",
            rich_help_panel=_HOW,
        ),
    ] = "none",
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Workers share GPUs where there are too few.", rich_help_panel=_HOW)
    ] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of every worker.", show_default="cores / workers", rich_help_panel=_HOW),
    ] = None,
    warmup: Annotated[int, typer.Option(min=1, metavar="N", help="Steps that do not count.", rich_help_panel=_HOW)] = 2,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps that do.", rich_help_panel=_HOW)] = 5,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep all rows; `thinpipe diff` reads it.", rich_help_panel=_RESULTS),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the tables as a page.", rich_help_panel=_RESULTS)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw samples per second.", rich_help_panel=_RESULTS)
    ] = None,
) -> None:
    """Pipelines against data-parallel and single-process training.

    The same model and batch for all. Every run prints the bound of its
    step, which is the larger of what the busiest worker computes and what the
    busiest direction of a link needs for its bytes, and the fraction it reached.
    Lists are separated by commas, and everything is run with everything. On
    several machines: torchrun ... -m thinpipe bench pipeline --workers N, on each.

    Example: thinpipe bench pipeline --model roberta --hidden 128 --tokens 64 --client-layers 4,4
    --link 10mbit,100mbit,1gbit,none --compress none,8bit,4bit
    """
    from thinpipe.bench.pipeline.measuring import measure_all
    from thinpipe.bench.pipeline.rows import COLUMNS, KIND, compare
    from thinpipe.bench.pipeline.settings import Settings
    from thinpipe.bench.pipeline.views import plot_speed, result_tables

    outputs = Outputs(json=json, markdown=markdown, plot=plot)
    shapes = Shapes(
        batch_size=batch_size, image_size=image_size, tokens=tokens, width=width, hidden=hidden, layers=layers
    )
    with one_line_errors():
        settings = Settings(
            model=model,
            shapes=shapes,
            workers=_numbers("--workers", workers),
            links=tuple(parse_links(link)),
            parallel=_words(parallel),
            layouts=_words(layout),
            schedules=_words(schedule),
            chunks=_numbers("--chunks", chunks),
            compress=tuple(dict.fromkeys(split_specs(compress))),
            stages=_words(stage),
            client_layers=None if client_layers is None else _pair(client_layers),
            device=device,
            threads=threads,
            warmup=warmup,
            steps=steps,
        )
        settings.check()
        outputs.check()
    with worker_errors():
        rows = compare(list(measure_all(settings, print_row)))
    if not rows:
        return  # under torchrun the first worker has them
    config = {"command": ["thinpipe", *sys.argv[1:]], **asdict(settings)}
    record = Record(kind=KIND, config=config, columns=COLUMNS, rows=tuple(rows))
    tables = result_tables(rows)
    typer.echo(f"\n{report.summary(record)}")
    report.show(tables)
    outputs.save(record, tables, f"Pipelines: {model}", plot_speed(rows, model))


def print_row(row: Row) -> None:
    """What the first worker does with every row: a run may take hours."""
    from thinpipe.bench.pipeline.views import row_line

    print(row_line(row), flush=True)


def _words(text: str) -> Any:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = _words(text)
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{option} takes whole numbers separated by commas, as in 1,2,4; got {text!r}")
    return tuple(map(int, words))


def _pair(text: str) -> tuple[int, int]:
    numbers = text.split(",")
    if len(numbers) != 2 or not all(number.strip().isdecimal() for number in numbers):
        raise ValueError(f"--client-layers takes two whole numbers, units at both ends, as in 1,1; got {text!r}")
    return int(numbers[0]), int(numbers[1])
