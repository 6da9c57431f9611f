"""A comparison for people and for programs: facts side by side, a table of changes, a record."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from rich.text import Text

from thinpipe.measure.diff import Diff, Fact, Pair
from thinpipe.measure.record import Check, Column, Record, Row
from thinpipe.measure.report import Table

FACT_WIDTH = 20  # of a value; what is longer takes several lines
BETTER, WORSE, DIFFERS = "green", "red", "bold yellow"
NOTE = "Changes in percent of the baseline."

_PERCENT = "+.1%"
_FACT_COLUMNS = (
    Column(name="name", heading="", key=True),
    Column(name="baseline", heading="baseline"),
    Column(name="test", heading="test"),
    Column(name="differs", heading="differs"),
)
_FIGURE_COLUMNS = (
    Column(name="column", heading="column", key=True),
    Column(name="baseline", heading="baseline", format=".6g"),
    Column(name="test", heading="test", format=".6g"),
    Column(name="change_percent", heading="change\n%", format="+.2f"),
    Column(name="worse_percent", heading="worse\n%", format="+.2f", better="lower"),
)


def fact_lines(facts: Sequence[Fact]) -> Iterator[Text]:
    """Every fact with its value in the baseline and in the test; a star marks what differs.

    bucket_cap_mb: 25 and 1 becomes ``* bucket_cap_mb:    25  vs     1``, with wider gaps.
    """
    label = max(len(fact.name) for fact in facts) + 3
    rule = "-" * FACT_WIDTH
    for left, right in (("baseline", "test"), (rule, rule)):
        yield Text(f"{'':{label}}  {left:>{FACT_WIDTH}}      {right:>{FACT_WIDTH}}")
    for fact in facts:
        sides = zip_longest(_folded(fact.baseline), _folded(fact.test), fillvalue="")
        for i, (before, after) in enumerate(sides):
            name = f"{'*' if fact.differs else ' '} {fact.name}:" if i == 0 else ""
            between = "vs" if i == 0 else "  "
            line = f"{name:{label}}  {before:>{FACT_WIDTH}}  {between}  {after:>{FACT_WIDTH}}"
            yield Text(line.rstrip(), style=DIFFERS if fact.differs else "")


def fact_table(facts: Sequence[Fact]) -> Table:
    """The same for a page."""
    rows = [
        {
            "name": fact.name,
            "baseline": _said(fact.baseline),
            "test": _said(fact.test),
            "differs": "*" if fact.differs else "",
        }
        for fact in facts
    ]
    return Table(title="Configuration", columns=_FACT_COLUMNS, rows=rows)


def change_table(diff: Diff, *, figures: bool) -> Table:
    """A row for every pair: the change of each column, and with ``figures`` what it was on both sides."""
    columns: list[Column] = list(diff.keys)
    for column in diff.columns:
        if figures:
            columns.append(replace(column, name=_side(column, "baseline"), heading=f"{column.heading}\nbaseline"))
            columns.append(replace(column, name=_side(column, "test"), heading=f"{column.heading}\ntest"))
        columns.append(
            replace(column, format=_PERCENT, heading=f"{column.heading}\ndiff" if figures else column.heading)
        )
    compared = {column.name: column for column in diff.columns}

    def style(row: Row, column: Column) -> str:
        change = row.get(column.name)
        if column.name not in compared or column.better is None or not change:
            return ""
        return WORSE if (change > 0) == (column.better == "lower") else BETTER

    rows = [_changes(pair, diff) for pair in diff.pairs]
    return Table(title=f"{diff.kind}: test against baseline", columns=columns, rows=rows, note=NOTE, style=style)


def missing_lines(diff: Diff) -> Iterator[Text]:
    """What only one of the records has, by name."""
    for where, names in (("baseline", diff.only_baseline), ("test", diff.only_test)):
        for name in names:
            yield Text(f"only in the {where}: {name}", style=DIFFERS)


def to_record(diff: Diff, checks: Sequence[Check], config: Row) -> Record:
    """A row for every figure of every pair."""
    rows = []
    for pair in diff.pairs:
        for column in diff.columns:
            change, worse = pair.change(column), pair.worsening(column)
            rows.append(
                {
                    **_key(pair, diff),
                    "column": column.name,
                    "baseline": pair.baseline.get(column.name),
                    "test": pair.test.get(column.name),
                    "change_percent": None if change is None else 100 * change,
                    "worse_percent": None if worse is None else 100 * worse,
                }
            )
    said = {
        **config,
        "facts_that_differ": {fact.name: [fact.baseline, fact.test] for fact in diff.facts if fact.differs},
        "only_baseline": list(diff.only_baseline),
        "only_test": list(diff.only_test),
    }
    return Record(
        kind=f"diff of {diff.kind}",
        config=said,
        columns=(*diff.keys, *_FIGURE_COLUMNS),
        rows=tuple(rows),
        checks=tuple(checks),
        environment={},
    )


def _changes(pair: Pair, diff: Diff) -> Row:
    row = dict(_key(pair, diff))
    for column in diff.columns:
        row[column.name] = pair.change(column)
        row[_side(column, "baseline")] = pair.baseline.get(column.name)
        row[_side(column, "test")] = pair.test.get(column.name)
    return row


def _key(pair: Pair, diff: Diff) -> Row:
    return {column.name: pair.test.get(column.name) for column in diff.keys}


def _side(column: Column, side: str) -> str:
    return f"{column.name} {side}"


def _folded(value: object) -> list[str]:
    return textwrap.wrap(_said(value), FACT_WIDTH) or ["-"]


def _said(value: object) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    lines = str(value).splitlines()
    return f"({len(lines)} lines)" if len(lines) > 1 else str(value)
