"""thinpipe bench: the benchmarks of codecs, DistributedDataParallel, links and pipelines, all run alike.

Each command reads its options, joins the other machines if there are any, measures, shows tables, and writes the output
files. Rows are printed as soon as they are measured, because a run may take hours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import typer

from thinpipe.cli.machines import Machines
from thinpipe.cli.replicas import worker_errors
from thinpipe.cli.terminal import Outputs, one_line_errors, progress_bar, takes
from thinpipe.lab.bench.codecs.codec_options import CodecBenchOptions
from thinpipe.lab.bench.ddp.ddp_options import DDPBenchOptions
from thinpipe.lab.bench.inputs import PANELS
from thinpipe.lab.bench.link.link_options import LinkBenchOptions
from thinpipe.lab.bench.models import Shapes
from thinpipe.lab.bench.outcome import Outcome, Print
from thinpipe.lab.bench.pipeline.pipeline_options import PipelineBenchOptions
from thinpipe.lab.records import report
from thinpipe.options import read

Benchmark = CodecBenchOptions | DDPBenchOptions | LinkBenchOptions | PipelineBenchOptions


@takes(CodecBenchOptions, Outputs, panels=PANELS)
def bench_codecs(**given: Any) -> None:
    """Measure size, error and time of each codec on this machine.

    Times are compared with a plain copy of the same tensor and with the reference implementation.
    Without options: the presets and every family of codecs on twelve tensors, two minutes on two cores.

    Example: thinpipe bench codecs --compress 8bit,uniform:8 --shape 8,128,768
    """
    from thinpipe.lab.bench.codecs.measure import measure

    _run(given, lambda: CodecBenchOptions(**read(CodecBenchOptions, given)), measure, progress=_bar())


@takes(Machines, DDPBenchOptions, Outputs, panels=PANELS)
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
    from thinpipe.lab.bench.ddp.iterations import measure

    _run(given, lambda: DDPBenchOptions(**read(DDPBenchOptions, given)), measure)


@takes(Machines, LinkBenchOptions, Outputs, panels=PANELS)
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
    from thinpipe.lab.bench.link.transfers import measure

    _run(given, lambda: LinkBenchOptions(**read(LinkBenchOptions, given)), measure)


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
    from thinpipe.lab.bench.pipeline.measuring import measure

    def options() -> PipelineBenchOptions:
        return PipelineBenchOptions(shapes=Shapes(**read(Shapes, given)), **read(PipelineBenchOptions, given))

    _run(given, options, measure)


def _run(
    given: dict[str, Any],
    make_options: Callable[[], Benchmark],
    measure: Callable[[Any, Print, Print], Outcome | None],
    progress: AbstractContextManager[Print] | None = None,
) -> None:
    """Measure, show and write the results; ``measure`` receives functions that print rows and progress."""
    with one_line_errors():
        options, outputs = make_options(), Outputs(**read(Outputs, given))
        Machines(**read(Machines, given)).join(options.joined_workers)
        options.check_here()
        outputs.check()
    with worker_errors(), progress or nullcontext(print_progress) as show:
        outcome = measure(options, partial(print, flush=True), show)
    if outcome is None:
        return  # worker 0 has the results
    record = replace(outcome.record, config={"command": ["thinpipe", *sys.argv[1:]], **outcome.record.config})
    tables = [*outcome.tables, *([report.check_table(record.checks, outcome.note)] if record.checks else [])]
    typer.echo(report.summary(record) if progress else f"\n{report.summary(record)}")  # without a bar, rows are above
    report.show(tables)
    outputs.save(record, tables, outcome.title, outcome.plot)
    if any(check.required and not check.passed for check in record.checks):
        raise typer.Exit(1)


def print_progress(line: str) -> None:
    """Print progress on stderr; called in the process of the first worker."""
    print(f"thinpipe: {line}", file=sys.stderr, flush=True)


@contextmanager
def _bar() -> Iterator[Print]:
    """Show progress in a bar if stderr is a terminal; only for benchmarks that measure in this process."""
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda line: bar.update(task, description=line)
