"""thinpipe bench ddp: iteration time of DistributedDataParallel, on this machine or on all machines of torchrun."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from thinpipe.cli.machines import Machines
from thinpipe.cli.replicas import check_workers, run_replicas
from thinpipe.cli.terminal import Outputs, one_line_errors, takes
from thinpipe.lab.bench.ddp.ddp_options import DDPBenchOptions
from thinpipe.lab.bench.ddp.ddp_tables import WIDE, heading_lines, model_lines, plot_speed, result_tables, row_lines
from thinpipe.lab.bench.inputs import PANELS, shared
from thinpipe.lab.netem.network import check_links, thin_network
from thinpipe.lab.records.record import Record, Row
from thinpipe.options import check, read


@dataclass(frozen=True, kw_only=True)
class Asked(Machines):
    """Options of the command in addition to the benchmark's settings."""

    workers: int | None = shared(
        "workers",
        "Replicas to start on this machine; on several, how many there are. Under torchrun: leave it out.",
        shown="one per GPU; 2 on CPU",
        default=None,
    )

    def __post_init__(self) -> None:
        check(self)


@takes(Asked, DDPBenchOptions, Outputs, panels=PANELS)
def bench_ddp(**given: Any) -> None:
    """Measure the iteration time of DistributedDataParallel.

    One replica without DDP, then groups of 1, 2, 4, ... and all replicas, each
    while the others wait. A group 2M/8G is 2 machines with 8 GPUs each (C: on
    CPU). sec/iter is that of the slowest replica, ex/sec are examples of one.

    On several machines, on each: thinpipe bench ddp --workers 3 --rank N
    --master HOST:PORT; or with several replicas on each: torchrun ... -m
    thinpipe bench ddp

    Example: thinpipe bench ddp --workers 2 --model resnet50 --image-size 64
    """
    with one_line_errors():
        asked, settings = Asked(**read(Asked, given)), DDPBenchOptions(**read(DDPBenchOptions, given))
        outputs = Outputs(**read(Outputs, given))
        asked.join(asked.workers)
        settings.check_here()
        outputs.check()
        count = check_workers(asked.workers, settings.found_device.type)
        shaped = None if count is None else settings.link  # links between machines are not shaped
        check_links([shaped], max(count or 2, 2))
    with thin_network(shaped, count or 1) as network:
        record = run_replicas(_replica, settings, ["thinpipe", *sys.argv[1:]], workers=count, network=network)
    if record is not None:
        outputs.save(record, result_tables(record), "Iteration time of DistributedDataParallel", plot_speed(record))


def _replica(settings: DDPBenchOptions, command: Sequence[str]) -> Record | None:
    """Run the benchmark on this replica; the first one prints each row."""
    from thinpipe.lab.bench.ddp.iterations import measure_iterations

    printer = _Printer()
    return measure_iterations(settings, command, on_start=printer.start, on_row=printer.row)


class _Printer:
    """Prints each row as soon as it is measured, since a run may take hours."""

    def __init__(self) -> None:
        self._model: str | None = None
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE

    def start(self, record: Record) -> None:
        self._print(heading_lines(record))

    def row(self, row: Row) -> None:
        if row["model"] != self._model:
            self._print([*([] if self._model is None else [""]), *model_lines(row, self._width)])
            self._model = row["model"]
        self._print(row_lines(row, self._width))

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(line, flush=True)
