"""thinpipe bench link: how long messages take between two workers, and from which rate on a codec stops paying."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from thinpipe.bench.link.settings import DEFAULT_SIZES, Settings, parse_sizes
from thinpipe.codecs.spec import split_specs
from thinpipe.commands.replicas import worker_errors
from thinpipe.commands.terminal import Outputs, one_line_errors
from thinpipe.measure import report
from thinpipe.measure.record import Record, Row
from thinpipe.workers.network import parse_links

_WHAT, _HOW, _RESULTS = "What is measured", "How it is measured", "What comes out"


def bench_link(
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,...", help="Bytes of a tensor of float32.", rich_help_panel=_WHAT)
    ] = DEFAULT_SIZES,
    compress: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC,...",
            help="Codecs to send through as well, as in sort:8,kmeans:4.",
            rich_help_panel=_WHAT,
            show_default="none alone",
        ),
    ] = None,
    link: Annotated[
        str,
        typer.Option(
            metavar="RATE,...",
            help="Workers in network namespaces with a link of this rate, as in 10mbit,100mbit,1gbit; needs root. "
            "none: as the machine is.",
            rich_help_panel=_WHAT,
        ),
    ] = "none",
    device: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda", help="Where tensors live. Two GPUs talk through NCCL, else gloo.", rich_help_panel=_HOW
        ),
    ] = "cpu",
    repeat: Annotated[
        int, typer.Option(min=1, metavar="N", help="Messages of one size, at most.", rich_help_panel=_HOW)
    ] = 50,
    budget: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time for messages of one size.", rich_help_panel=_HOW)
    ] = 2.0,
    sender_delay: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Worker 0 sends so much later than it could: recv time grows, the transfer does not.",
            rich_help_panel=_HOW,
        ),
    ] = 0.0,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep all rows; `thinpipe diff` reads it.", rich_help_panel=_RESULTS),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the tables as a page.", rich_help_panel=_RESULTS)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw time against size.", rich_help_panel=_RESULTS)
    ] = None,
) -> None:
    """How long messages take between two workers.

    One way and both ways at once, with the line latency + bytes / bandwidth
    through all sizes. The time of a transfer begins when its sender hands it
    over; recv time, which is often printed instead, begins when its receiver
    wants it.

    Between two machines: torchrun ... -m thinpipe bench link, on each.

    Example: thinpipe bench link --link 100mbit --compress sort:8,kmeans:4
    """
    from thinpipe.bench.link.rows import COLUMNS, KIND, with_lines
    from thinpipe.bench.link.transfers import measure_links
    from thinpipe.bench.link.views import plot_times, result_tables

    outputs = Outputs(json=json, markdown=markdown, plot=plot)
    with one_line_errors():
        settings = Settings(
            sizes=parse_sizes(sizes),
            compress=tuple(split_specs(compress or "")),
            links=tuple(parse_links(link)),
            device=device,
            repeat=repeat,
            budget_s=budget,
            sender_delay_s=sender_delay,
        )
        settings.check()
        outputs.check()
    with worker_errors():
        rows = with_lines(list(measure_links(settings, print_row)))
    if not rows:
        return  # under torchrun the first worker has them
    config = {"command": ["thinpipe", *sys.argv[1:]], **asdict(settings)}
    record = Record(kind=KIND, config=config, columns=COLUMNS, rows=tuple(rows))
    tables = result_tables(rows)
    typer.echo(f"\n{report.summary(record)}")
    report.show(tables)
    outputs.save(record, tables, "Links", plot_times(rows))


def print_row(row: Row) -> None:
    """What the first worker does with every row, as soon as it is known."""
    from thinpipe.bench.link.views import row_line

    print(row_line(row), flush=True)
