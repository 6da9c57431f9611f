"""thinpipe bench codecs: what each codec sends, loses and costs on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from thinpipe.bench.codecs import COLUMNS, DEFAULT_CODECS, DEFAULT_SHAPES, Settings, measure_codecs
from thinpipe.bench.contents import DEFAULT_CONTENTS, Case
from thinpipe.bench.inputs import check_counts, check_seconds, choose_cases, find_device, parse_codecs
from thinpipe.bench.outside import NAMES as OUTSIDE_NAMES
from thinpipe.bench.targets import check_gpu_targets, check_targets
from thinpipe.bench.verify import NOTE as CHECKS_NOTE
from thinpipe.bench.verify import verify_codecs
from thinpipe.bench.views import plot_error_against_bits, result_tables
from thinpipe.codecs import FAMILIES, Codec
from thinpipe.commands.terminal import Outputs, one_line_errors, progress_bar
from thinpipe.measure import report
from thinpipe.measure.record import Check, Record, Row

_WHAT, _HOW, _RESULTS = "What is measured", "How it is measured", "What comes out"


def bench_codecs(
    codecs: Annotated[
        str,
        typer.Option(
            metavar="SPEC,...",
            help=f"Codecs by their specs, separated by commas. The families: {', '.join(FAMILIES)}. To compare with: "
            f"{', '.join(OUTSIDE_NAMES)} of bitsandbytes, if installed.",
            rich_help_panel=_WHAT,
            show_default="several of each",
        ),
    ] = DEFAULT_CODECS,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,...",
            help="Shape of the tensors; repeat for several.",
            rich_help_panel=_WHAT,
            show_default=" ".join(",".join(map(str, shape)) for shape in DEFAULT_SHAPES),
        ),
    ] = None,
    content: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What they hold; repeat for several. relu6: an activation, half zeros. outliers: normal, six "
            "channels 20 times larger. laplace: a gradient. masked: a gradient, half zeros.",
            rich_help_panel=_WHAT,
            show_default=" ".join(DEFAULT_CONTENTS),
        ),
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Compress the float tensors of this .safetensors file instead. Of captured ones, such as "
            "forward/0-1/0/step000003/chunk0, tables show the mean of each link.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Hold the codecs against the literal algorithms and scikit-learn too; adds minutes. "
            "Exit code 1 if a promise is broken.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    reference: Annotated[
        Literal["largest", "all", "none"],
        typer.Option(help="On which tensors to time the literal algorithms, seconds each.", rich_help_panel=_HOW),
    ] = "largest",
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where tensors live.", rich_help_panel=_HOW)] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="CPU threads.", rich_help_panel=_HOW, show_default="all cores"),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs of a call, at most.", rich_help_panel=_HOW)
    ] = 20,
    budget: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Time for the runs of a call, about.", rich_help_panel=_HOW),
    ] = 0.2,
    by_bits: Annotated[
        bool,
        typer.Option(
            "--by-bits",
            help="Order tables by the bits per value on the wire: what sends the same stands together.",
            rich_help_panel=_RESULTS,
        ),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep all rows, settings, environment.", rich_help_panel=_RESULTS),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the tables as a page.", rich_help_panel=_RESULTS),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw error against bits per value.", rich_help_panel=_RESULTS),
    ] = None,
) -> None:
    """What each codec sends, loses and costs on this machine.

    Times stand beside a plain copy of the same tensor and beside the literal algorithm.
    Without options: every family of codecs on twelve tensors, one to two minutes on two cores.

    Example: thinpipe bench codecs --codecs sort:8,uniform:8 --shape 8,128,768
    """
    outputs = Outputs(json=json, markdown=markdown, plot=plot)
    with one_line_errors():
        check_counts(threads=threads, repeat=repeat)
        check_seconds(budget=budget)
        if threads is not None:
            torch.set_num_threads(threads)  # the codecs use as many
        chosen = parse_codecs(codecs, outside=True)
        on = find_device(device, chosen)
        cases = choose_cases(shape or [], content or [], from_file, device)
        outputs.check()
        if verify and find_spec("sklearn") is None:
            raise ValueError("--verify compares with scikit-learn, which is missing: pip install scikit-learn")

    settings = Settings(device=on, repeat=repeat, budget_s=budget, reference=reference)
    rows = _measure(cases, chosen, settings)
    targets = list(check_targets(rows) if on.type == "cpu" else check_gpu_targets(rows))
    checks = [*_verify(cases, on), *targets] if verify else [] if on.type == "cpu" else targets
    record = Record(
        kind="bench codecs",
        config={
            "command": ["thinpipe", *sys.argv[1:]],
            "device": device,
            "repeat": repeat,
            "budget_s": budget,
            "reference": reference,
        },
        columns=COLUMNS,
        rows=tuple(rows),
        checks=tuple(checks),
    )
    tables = [*result_tables(rows, on.type, by_bits), *([report.check_table(checks, CHECKS_NOTE)] if checks else [])]
    typer.echo(report.summary(record))
    report.show(tables)
    outputs.save(record, tables, "Codecs", plot_error_against_bits(rows))
    if any(check.required and not check.passed for check in checks):
        raise typer.Exit(1)


def _measure(cases: Sequence[Case], codecs: Sequence[Codec], settings: Settings) -> list[Row]:
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
