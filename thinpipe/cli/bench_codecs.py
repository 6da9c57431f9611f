"""thinpipe bench codecs: size, error and time of each codec on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import typer

from thinpipe.cli.terminal import Outputs, one_line_errors, progress_bar, takes
from thinpipe.codecs import Codec
from thinpipe.lab.bench.codecs.codec_options import CodecBenchOptions
from thinpipe.lab.bench.codecs.codec_tables import plot_error_against_bits, result_tables
from thinpipe.lab.bench.codecs.measure import CodecColumns, measure_codecs
from thinpipe.lab.bench.codecs.synthetic import Case
from thinpipe.lab.bench.codecs.verify import NOTE as CHECKS_NOTE
from thinpipe.lab.bench.codecs.verify import TARGETS_NOTE, targets_for, verify_codecs
from thinpipe.lab.bench.inputs import PANELS
from thinpipe.lab.records import report
from thinpipe.lab.records.record import Check, Record, Row, columns_of
from thinpipe.options import read


@takes(CodecBenchOptions, Outputs, panels=PANELS)
def bench_codecs(**given: Any) -> None:
    """Measure size, error and time of each codec on this machine.

    Times are compared with a plain copy of the same tensor and with the literal algorithm.
    Without options: the presets and every family of codecs on twelve tensors, two minutes on two cores.

    Example: thinpipe bench codecs --compress 8bit,uniform:8 --shape 8,128,768
    """
    with one_line_errors():
        settings, outputs = CodecBenchOptions(**read(CodecBenchOptions, given)), Outputs(**read(Outputs, given))
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)  # also the number of threads of the codecs
        codecs, device, cases = settings.codecs, settings.found_device, settings.cases()
        outputs.check()
    rows = _measure(cases, codecs, settings)
    targets = targets_for(device, rows)
    checks = [*_verify(cases, device), *targets] if settings.verify else [] if device.type == "cpu" else targets
    record = Record(
        kind="bench codecs",
        config={
            "command": ["thinpipe", *sys.argv[1:]],
            "device": str(device),
            "repeat": settings.repeat,
            "budget_s": settings.budget,
            "reference": settings.reference,
        },
        columns=columns_of(CodecColumns),
        rows=tuple(rows),
        checks=tuple(checks),
    )
    tables = result_tables(rows, device.type, settings.by_bits)
    if checks:
        tables.append(report.check_table(checks, CHECKS_NOTE if settings.verify else TARGETS_NOTE))
    typer.echo(report.summary(record))
    report.show(tables)
    outputs.save(record, tables, "Codecs", plot_error_against_bits(rows))
    if any(check.required and not check.passed for check in checks):
        raise typer.Exit(1)


def _measure(cases: Sequence[Case], codecs: Sequence[Codec], settings: CodecBenchOptions) -> list[Row]:
    rows = []
    counts = {(case.shape_text, case.content): case.count for case in cases}
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=len(codecs) * sum(counts.values()))
        for row in measure_codecs(cases, codecs, settings):
            rows.append(row)
            done = f"{row['codec']} on {row['content']} {row['shape']}"
            progress.update(task, advance=counts[row["shape"], row["content"]], description=done)
    return rows


def _verify(cases: Sequence[Case], device: torch.device) -> list[Check]:
    checks = []
    with progress_bar() as progress:
        task = progress.add_task("verifying", total=None)
        for check in verify_codecs(cases, device):
            checks.append(check)
            progress.update(task, description=check.claim)
    return checks
