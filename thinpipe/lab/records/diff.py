"""Comparison of two records of one kind: settings side by side, and the change of each metric."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from rich.text import Text

from thinpipe.lab.records.record import Check, Column, Record, Row
from thinpipe.lab.records.report import Table
from thinpipe.options import OptionError

_UNCOMPARED = {"command"}  # contains names of output files: always different
FACT_WIDTH = 20  # width of a value; longer values are wrapped
BETTER, WORSE, DIFFERS = "green", "red", "bold yellow"
NOTE = "Changes in percent of the baseline."

_PERCENT = "+.1%"
_FACT_COLUMNS = (
    Column(name="name", heading="", key=True),
    *(Column(name=name, heading=name) for name in ("baseline", "test", "differs")),
)
_METRIC_COLUMNS = (
    Column(name="column", heading="column", key=True),
    Column(name="baseline", heading="baseline", format=".6g"),
    Column(name="test", heading="test", format=".6g"),
    Column(name="change_percent", heading="change\n%", format="+.2f"),
    Column(name="worse_percent", heading="worse\n%", format="+.2f", better="lower"),
)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One setting or property of the machine, in both records."""

    name: str
    baseline: Any
    test: Any

    @property
    def differs(self) -> bool:
        return bool(self.baseline != self.test)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The matching rows of the two records."""

    baseline: Row
    test: Row

    def change(self, column: Column) -> float | None:
        """Return the relative change of a metric; None if a side has no number."""
        before, after = number(self.baseline, column), number(self.test, column)
        if before is None or after is None:
            return None
        if before == after:
            return 0.0
        return (after - before) / abs(before) if before else math.copysign(math.inf, after - before)

    def worsening(self, column: Column) -> float | None:
        """Return the relative change, positive if worse; infinity if only the test has no number."""
        if column.better is None or number(self.baseline, column) is None:
            return None
        change = self.change(column)
        if change is None:
            return math.inf  # null in a record: the value was not finite
        return change if column.better == "lower" else -change


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The matching rows and columns of two records, and those of only one."""

    kind: str
    facts: tuple[Fact, ...]
    keys: tuple[Column, ...]
    columns: tuple[Column, ...]  # the compared metrics
    pairs: tuple[Pair, ...]
    only_baseline: tuple[str, ...]  # names of rows and columns that the test lacks
    only_test: tuple[str, ...]

    def check(self, limit: float) -> Check:
        """Return the check that no metric got worse by more than ``limit``, a fraction of the baseline: 0.05 is 5%."""
        worst, where = 0.0, ""
        for pair in self.pairs:
            for column in self.columns:
                worsening = pair.worsening(column)
                if worsening is not None and worsening > worst:
                    worst, where = worsening, f"{column.name} of {row_name(pair.test, self.keys)}"
        return Check(
            claim="the metric that got worse the most", measured=100 * worst, limit=100 * limit, unit="%", detail=where
        )


def compare(baseline: Record, test: Record, columns: Sequence[str] = ()) -> Diff:
    """Match the rows of two records; the default columns are all common metrics that can improve.

    Raise ValueError if there is nothing to compare.
    """
    if baseline.kind != test.kind:
        raise ValueError(f"only records of one kind can be compared; got {baseline.kind!r} and {test.kind!r}")
    keys = tuple(column for column in test.columns if column.key)
    before, after = _by_key(baseline, keys), _by_key(test, keys)
    pairs = tuple(Pair(baseline=before[key], test=row) for key, row in after.items() if key in before)
    if not pairs:
        names = ", ".join(column.name for column in keys)
        raise ValueError(f"rows are matched by {names}, and no row is in both records")
    lost_columns, new_columns = _missing(baseline.columns, test.columns), _missing(test.columns, baseline.columns)
    return Diff(
        kind=test.kind,
        facts=_facts(baseline, test),
        keys=keys,
        columns=_compared(baseline, test, columns),
        pairs=pairs,
        only_baseline=(*(row_name(row, keys) for key, row in before.items() if key not in after), *lost_columns),
        only_test=(*(row_name(row, keys) for key, row in after.items() if key not in before), *new_columns),
    )


def number(row: Row, column: Column) -> float | None:
    """Return the value of a column if it is a number, else None."""
    value = row.get(column.name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def row_name(row: Row, keys: Sequence[Column]) -> str:
    return ", ".join(str(row.get(column.name)) for column in keys)


def _by_key(record: Record, keys: Sequence[Column]) -> Mapping[tuple[Any, ...], Row]:
    """Return rows by key and occurrence, so that rows with equal keys are matched in order."""
    seen: Counter[str] = Counter()
    rows = {}
    for row in record.rows:
        name = row_name(row, keys)
        rows[name, seen[name]] = row
        seen[name] += 1
    return rows


def _compared(baseline: Record, test: Record, names: Sequence[str]) -> tuple[Column, ...]:
    here = {column.name for column in baseline.columns}
    metrics = {column.name: column for column in test.columns if column.name in here and not column.key}
    unknown = [name for name in names if name not in metrics]
    if unknown:
        raise OptionError(f"{{columns}} takes metrics that both records have: {', '.join(metrics)}; got {unknown[0]!r}")
    if names:
        return tuple(metrics[name] for name in dict.fromkeys(names))
    return tuple(column for column in metrics.values() if column.better is not None)


def _missing(columns: Sequence[Column], others: Sequence[Column]) -> list[str]:
    there = {column.name for column in others}
    return [f"column {column.name}" for column in columns if column.name not in there]


def _facts(baseline: Record, test: Record) -> tuple[Fact, ...]:
    before, after = _facts_of(baseline), _facts_of(test)
    names = sorted((before.keys() | after.keys()) - _UNCOMPARED)
    return tuple(Fact(name=name, baseline=before.get(name), test=after.get(name)) for name in names)


def _facts_of(record: Record) -> dict[str, Any]:
    return {"thinpipe": record.thinpipe, **record.environment, **record.config}


def fact_lines(facts: Sequence[Fact]) -> Iterator[Text]:
    """Yield each fact with its value in the baseline and in the test; a star marks differences.

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
    """Return the facts as a table, for a Markdown page."""
    rows = [
        {
            "name": fact.name,
            "baseline": _shown(fact.baseline),
            "test": _shown(fact.test),
            "differs": "*" if fact.differs else "",
        }
        for fact in facts
    ]
    return Table(title="Configuration", columns=_FACT_COLUMNS, rows=rows)


def change_table(diff: Diff, *, values: bool) -> Table:
    """Return a row per pair: the change of each column, with ``values`` also its value on both sides."""
    columns: list[Column] = list(diff.keys)
    for column in diff.columns:
        if values:
            columns.append(replace(column, name=_side(column, "baseline"), heading=f"{column.heading}\nbaseline"))
            columns.append(replace(column, name=_side(column, "test"), heading=f"{column.heading}\ntest"))
        columns.append(
            replace(column, format=_PERCENT, heading=f"{column.heading}\ndiff" if values else column.heading)
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
    """Yield the names of rows and columns that only one record has."""
    for where, names in (("baseline", diff.only_baseline), ("test", diff.only_test)):
        for name in names:
            yield Text(f"only in the {where}: {name}", style=DIFFERS)


def to_record(diff: Diff, checks: Sequence[Check], config: Row) -> Record:
    """Return a record of the comparison, with a row per metric and pair."""
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
    facts = {
        **config,
        "facts_that_differ": {fact.name: [fact.baseline, fact.test] for fact in diff.facts if fact.differs},
        "only_baseline": list(diff.only_baseline),
        "only_test": list(diff.only_test),
    }
    return Record(
        kind=f"diff of {diff.kind}",
        config=facts,
        columns=(*diff.keys, *_METRIC_COLUMNS),
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
    return textwrap.wrap(_shown(value), FACT_WIDTH) or ["-"]


def _shown(value: object) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    lines = str(value).splitlines()
    return f"({len(lines)} lines)" if len(lines) > 1 else str(value)
