"""thinpipe bench link: transfer times between two workers, and the rate above which a codec does not pay."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import typer

from thinpipe.cli.machines import Machines
from thinpipe.cli.replicas import worker_errors
from thinpipe.cli.terminal import Outputs, one_line_errors, takes
from thinpipe.comm.shaping import link_text, list_facts
from thinpipe.lab.bench.inputs import PANELS, shared
from thinpipe.lab.bench.link.link_options import WORKERS, LinkBenchOptions
from thinpipe.lab.records import report
from thinpipe.lab.records.record import Check, Record, Row, columns_of
from thinpipe.options import Rule, check, read


@dataclass(frozen=True, kw_only=True)
class Asked(Machines):
    """Options of the command in addition to the benchmark's settings."""

    workers: int | None = shared(
        "workers",
        "Always 2, the ends of the link.",
        rule=Rule(f"{WORKERS}, the ends of the link", WORKERS.__eq__),
        default=None,
        usual=WORKERS,
    )

    def __post_init__(self) -> None:
        check(self)


@takes(Asked, LinkBenchOptions, Outputs, panels=PANELS)
def bench_link(**given: Any) -> None:
    """Measure transfer times between two workers.

    First the link's round-trip time, loss and rates; then messages of all sizes,
    one way and both ways at once, with a fit of latency + bytes / bandwidth. A
    transfer is timed from the call of send; recv time, which is often printed
    instead, is timed from the call of recv.

    Between two machines, on each: thinpipe bench link --workers 2 --rank N
    --master HOST:PORT

    Example: thinpipe bench link --link 100mbit --compress 8bit,kmeans:4
    """
    from thinpipe.lab.bench.link.link_columns import KIND, LinkColumns, with_lines
    from thinpipe.lab.bench.link.link_tables import plot_times, result_tables
    from thinpipe.lab.bench.link.transfers import measure_links

    with one_line_errors():
        asked, settings = Asked(**read(Asked, given)), LinkBenchOptions(**read(LinkBenchOptions, given))
        outputs = Outputs(**read(Outputs, given))
        asked.join(asked.workers)
        settings.check_here()
        outputs.check()
    with worker_errors():
        on_row = partial(print_row, links=list(map(link_text, settings.links)), codecs=settings.codecs)
        rows = with_lines(list(measure_links(settings, on_row)))
    if not rows:
        return  # only worker 0 has the rows
    told = {**asdict(settings), "links": list_facts(settings.links), "device": str(settings.found_device)}
    config = {"command": ["thinpipe", *sys.argv[1:]], **told}
    checks = _verify(settings, rows) if settings.verify else ()
    record = Record(kind=KIND, config=config, columns=columns_of(LinkColumns), rows=tuple(rows), checks=checks)
    tables = [*result_tables(rows), *([report.check_table(checks)] if checks else [])]
    typer.echo(f"\n{report.summary(record)}")
    report.show(tables)
    outputs.save(record, tables, "Links", plot_times(rows))
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _verify(settings: LinkBenchOptions, rows: Sequence[Row]) -> tuple[Check, ...]:
    from thinpipe.lab.bench.link.probe import check_probed

    probed = {row["link"]: row for row in rows}
    return tuple(check for link in settings.links if link for check in check_probed(link, probed[link.text]))


def print_row(row: Row, links: Sequence[str], codecs: Sequence[str]) -> None:
    """Print a row as soon as it is measured; called by the first worker."""
    from thinpipe.lab.bench.link.link_tables import row_line

    print(row_line(row, links, codecs), flush=True)
