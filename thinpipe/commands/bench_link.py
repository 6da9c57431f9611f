"""thinpipe bench link: how long messages take between two workers, and from which rate on a codec stops paying."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from thinpipe.bench.inputs import PANELS
from thinpipe.bench.link.settings import Settings
from thinpipe.commands.replicas import worker_errors
from thinpipe.commands.terminal import Outputs, one_line_errors, takes
from thinpipe.measure import report
from thinpipe.measure.record import Check, Record, Row, columns_of
from thinpipe.options import read
from thinpipe.workers.shape import list_facts


@takes(Settings, Outputs, panels=PANELS)
def bench_link(**given: Any) -> None:
    """Measure transfer times between two workers.

    First the link's round-trip time, loss and rates; then messages of all sizes,
    one way and both ways at once, with a fit of latency + bytes / bandwidth. A
    transfer is timed from the call of send; recv time, which is often printed
    instead, is timed from the call of recv.

    Between two machines: torchrun ... -m thinpipe bench link, on each.

    Example: thinpipe bench link --link 100mbit --compress 8bit,kmeans:4
    """
    from thinpipe.bench.link.rows import KIND, Figures, with_lines
    from thinpipe.bench.link.transfers import measure_links
    from thinpipe.bench.link.views import plot_times, result_tables

    with one_line_errors():
        settings, outputs = Settings(**read(Settings, given)), Outputs(**read(Outputs, given))
        settings.check_here()
        outputs.check()
    with worker_errors():
        rows = with_lines(list(measure_links(settings, print_row)))
    if not rows:
        return  # under torchrun the first worker has them
    told = {**asdict(settings), "links": list_facts(settings.links), "device": str(settings.found_device)}
    config = {"command": ["thinpipe", *sys.argv[1:]], **told}
    checks = _verify(settings, rows) if settings.verify else ()
    record = Record(kind=KIND, config=config, columns=columns_of(Figures), rows=tuple(rows), checks=checks)
    tables = [*result_tables(rows), *([report.check_table(checks)] if checks else [])]
    typer.echo(f"\n{report.summary(record)}")
    report.show(tables)
    outputs.save(record, tables, "Links", plot_times(rows))
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _verify(settings: Settings, rows: Sequence[Row]) -> tuple[Check, ...]:
    from thinpipe.bench.link.probe import check_probed

    probed = {row["link"]: row for row in rows}
    return tuple(check for link in settings.links if link for check in check_probed(link, probed[link.text]))


def print_row(row: Row) -> None:
    """What the first worker does with every row, as soon as it is known."""
    from thinpipe.bench.link.views import row_line

    print(row_line(row), flush=True)
