"""thinpipe diff: the changes between two records of the same kind."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from thinpipe.cli.terminal import RESULTS, Outputs, one_line_errors, takes
from thinpipe.lab.records import report
from thinpipe.lab.records.diff import change_table, compare, fact_lines, fact_table, missing_lines, to_record
from thinpipe.lab.records.record import Record
from thinpipe.options import OptionError, option, read

_WHAT = "What is compared"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise OptionError("{columns} takes names separated by commas, as in encode_ms,decode_ms; got none")
    return names


def _percent(text: str) -> float:
    """Return ``5%`` or ``5`` as a fraction."""
    if not re.fullmatch(r"\d+(\.\d+)?%?", text):
        raise OptionError(f"{{fail_above}} takes a percentage of 0 or more, as in 5%; got {text!r}")
    return float(text.rstrip("%")) / 100


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """The compared columns, and the largest change."""

    columns: tuple[str, ...] = option(
        "Compare these metrics only, and show their values on both sides.",
        panel=_WHAT,
        metavar="NAME,...",
        default_text="every metric that can improve",
        parse=_names,
        default=(),
    )
    fail_above: float | None = option(
        "Exit with code 1 if a metric got worse by more than this, as in 5%, or is missing in TEST.json.",
        panel=_WHAT,
        metavar="PERCENT",
        parse=_percent,
        default=None,
    )


@takes(DiffOptions, Outputs, panels=(_WHAT, RESULTS), but=("plot",))
def diff(
    baseline: Annotated[
        Path, typer.Argument(metavar="BASELINE.json", help="The record to compare with.", show_default=False)
    ],
    test: Annotated[Path, typer.Argument(metavar="TEST.json", help="The record to compare.", show_default=False)],
    **given: Any,
) -> None:
    """Compare two records of the same kind, written with --json.

    Shows settings and machines side by side, with a star where they differ; then
    every row that both records have, matched by its keys, and the change of each
    metric in percent of the baseline. Rows in one file only are listed.

    Exit code 0, or 1 by --fail-above, or 2 if the files cannot be compared.

    Example: thinpipe diff before.json after.json --fail-above 5%
    """
    with one_line_errors():
        options, outputs = DiffOptions(**read(DiffOptions, given)), Outputs(**read(Outputs, given))
        outputs.check()
        result = compare(Record.read(baseline), Record.read(test), options.columns)
    changes = change_table(result, values=bool(options.columns))
    missing = list(missing_lines(result))
    checks = [] if options.fail_above is None else [result.check(options.fail_above)]
    check_tables = [report.check_table(checks)] if checks else []
    report.show_lines([*fact_lines(result.facts), Text()])
    report.show([changes])
    report.show_lines([*missing, Text()] if missing else [])
    report.show(check_tables)
    record = to_record(result, checks, {"command": ["thinpipe", *sys.argv[1:]]})
    noted = replace(changes, note="\n\n".join([changes.note, *(line.plain for line in missing)]))
    outputs.save(record, [fact_table(result.facts), noted, *check_tables], f"{result.kind}: test against baseline")
    if not all(check.passed for check in checks):
        raise typer.Exit(1)
