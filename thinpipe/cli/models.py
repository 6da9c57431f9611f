"""thinpipe models: the model types of transformers that can be cut into units."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from thinpipe.cli.terminal import Outputs, one_line_errors, progress_bar
from thinpipe.lab.records import report
from thinpipe.lab.records.record import Check, Column, Record, Row
from thinpipe.train.models.verify import KINDS, LIMIT_S, Outcome, types_of, verify

KIND = "models"
COLUMNS = (
    Column(name="kind", heading="kind", key=True),
    Column(name="type", heading="type", key=True),
    Column(name="model", heading="class", key=True),
    Column(name="outcome", heading="outcome", key=True),
    Column(name="reason", heading="reason", key=True),
    Column(name="blocks", heading="blocks"),
    Column(name="seconds", heading="s", format=".1f"),
)
# The record of `thinpipe models --verify` at the release.
RECORD = Path(__file__).parents[1] / "train" / "models" / "verified.json"


def models(
    verify_them: Annotated[
        bool,
        typer.Option(
            "--verify", help=f"Cut a small model of every type now, in minutes, at most {LIMIT_S:g} s a type."
        ),
    ] = False,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="NAME", help="Only this type; repeatable. [default: all]"),
    ] = None,
    kind: Annotated[
        Literal["causal", "sequence", "image"] | None,
        typer.Option(help="Only language models, text classifiers or image classifiers. [default: all]"),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all rows to this record.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables to this page.")] = None,
) -> None:
    """List the models of transformers that can be cut into units.

    exact: logits and gradients of the units are bit-identical to the model's, on
    a padded batch and a small random model of the type. Other models are rejected
    before a run, with the reason. Exit code 1 if one would differ without being rejected.

    Example: thinpipe models --verify --type llama --type gemma2
    """
    outputs = Outputs(json=json, markdown=markdown)
    with one_line_errors():
        wanted = _choose(list(KINDS) if kind is None else [kind], types or [])
        outputs.check()
    rows = _verify(wanted) if verify_them else _look_up(wanted)
    different = [row["type"] for row in rows if row["outcome"] == "different"]
    checks = [Check(claim="types that differ", measured=len(different), limit=0, detail=", ".join(different))]
    record = Record(
        kind=KIND,
        config={"command": ["thinpipe", *sys.argv[1:]], "transformers": version("transformers")},
        columns=COLUMNS,
        rows=tuple(rows),
        checks=tuple(checks),
    )
    others = [row for row in rows if row["outcome"] != "exact"]
    listed = (
        _table("Not exact", others, "seconds") if verify_them else _table("All", rows, "reason", "blocks", "seconds")
    )
    tables = [_summary(rows), listed]
    report.show(table for table in tables if table.rows)
    outputs.save(record, [*tables, _exact(rows)] if verify_them else tables, "Models")
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _choose(kinds: Sequence[str], types: Sequence[str]) -> list[tuple[str, str]]:
    """Return the types of these kinds, or the given ones; raise ValueError for a type that transformers lacks."""
    every = [(kind, name) for kind in kinds for name in types_of(kind)]
    unknown = sorted(set(types) - {name for _, name in every})
    if unknown:
        raise ValueError(
            f"--type takes model types of transformers {version('transformers')}, such as llama; got {unknown[0]}: "
            "`thinpipe models` lists them"
        )
    return [(kind, name) for kind, name in every if not types or name in types]


def _verify(wanted: Sequence[tuple[str, str]]) -> list[Row]:
    rows = {}
    with progress_bar() as progress:
        task = progress.add_task("starting", total=len(wanted))
        for done in verify(wanted):
            rows[done.kind, done.type] = asdict(done)
            progress.update(task, advance=1, description=f"{done.type}: {done.outcome}")
    return [rows[each] for each in wanted]


def _look_up(wanted: Sequence[tuple[str, str]]) -> list[Row]:
    """Return the rows of the release's record; types that its version of transformers lacked are not verified."""
    known = {(row["kind"], row["type"]): row for row in Record.read(RECORD).rows}
    return [
        known.get((kind, name), {"kind": kind, "type": name, "model": types_of(kind)[name], "outcome": "not verified"})
        for kind, name in wanted
    ]


def _summary(rows: Sequence[Row]) -> report.Table:
    outcomes = (*get_args(Outcome), "not verified")
    counted = [
        {
            "kind": kind,
            "types": len(of_kind),
            **{outcome: n for outcome in outcomes if (n := sum(row["outcome"] == outcome for row in of_kind))},
        }
        for kind in KINDS
        if (of_kind := [row for row in rows if row["kind"] == kind])
    ]
    columns = (
        Column(name="kind", heading="kind", key=True),
        Column(name="types", heading="types"),
        *(Column(name=outcome, heading=outcome) for outcome in outcomes),
    )
    return report.Table(title="Model types", columns=columns, rows=counted)


def _table(title: str, rows: Sequence[Row], *left_out: str) -> report.Table:
    return report.Table(title=title, columns=[each for each in COLUMNS if each.name not in left_out], rows=rows)


def _exact(rows: Sequence[Row]) -> report.Table:
    """Return only the names of the exact types, since a row per type would be too long for a page."""
    named = [
        {
            "kind": kind,
            "types": ", ".join(row["type"] for row in rows if (row["kind"], row["outcome"]) == (kind, "exact")),
        }
        for kind in KINDS
    ]
    columns = (Column(name="kind", heading="kind", key=True), Column(name="types", heading="types", key=True))
    return report.Table(title="Exact", columns=columns, rows=[row for row in named if row["types"]])
