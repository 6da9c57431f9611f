"""Tables of records: rich on a terminal, plain text in a pipe, Markdown for a page."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from thinpipe.lab.records.record import Check, Column, Record, Row

GAP = 2  # spaces between columns
NOTE_WIDTH = 80

_CHECK_COLUMNS = (
    Column(name="verdict", heading="", key=True),
    Column(name="claim", heading="claim", key=True),
    Column(name="measured", heading="measured"),
    Column(name="limit", heading="limit"),
)
_STYLES = {"PASS": "green", "FAIL": "bold red", "MISS": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a title; columns without values in any row are omitted."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""  # below the table
    explained: Mapping[str, str] = field(default_factory=dict)  # by column: a sentence of the note, if it is shown
    style: Callable[[Row, Column], str] | None = None  # colour of a cell on a terminal

    def shown(self) -> list[Column]:
        return [column for column in self.columns if any(row.get(column.name) is not None for row in self.rows)]

    def footnote(self) -> str:
        """Return the text below the table: an explanation of the columns that are shown, and the note."""
        sentences = dict.fromkeys(filter(None, (self.explained.get(each.name) for each in self.shown())))
        return "\n".join(filter(None, [textwrap.fill(" ".join(sentences), NOTE_WIDTH), self.note]))


def check_table(checks: Iterable[Check], note: str = "") -> Table:
    """Return a table of checks with verdicts: a required check FAILs, a target is a MISS."""
    rows = [
        {
            "verdict": "PASS" if check.passed else "FAIL" if check.required else "MISS",
            "claim": check.claim if check.passed or not check.detail else f"{check.claim} ({check.detail})",
            "measured": "-" if check.measured is None else f"{check.measured:.4g}{check.unit}",
            "limit": f"{'≤' if check.bound == 'at most' else '≥'} {check.limit:g}{check.unit}",
        }
        for check in checks
    ]
    return Table(title="Checks", columns=_CHECK_COLUMNS, rows=rows, note=note)


def summary(record: Record) -> str:
    """Return one line on versions and hardware."""
    facts = record.environment
    devices = "".join(f", {name}" for name in facts["devices"])
    return (
        f"thinpipe {record.thinpipe}, torch {facts['torch']}, {facts['cpu']}{devices}, "
        f"{facts['cores']} cores, {facts['threads']} thread{'s' * (facts['threads'] != 1)}"
    )


def show(tables: Iterable[Table], console: Console | None = None) -> None:
    """Print tables to the console: aligned text if it is not a terminal."""
    console = console or Console(highlight=False)
    for table in tables:
        if console.is_terminal:
            console.print(Text(f"\n{table.title}", style="bold"))
            for i, block in enumerate(_blocks(table, console.width)):
                console.print(*([""] if i else []), _rich_table(table, block), sep="\n")
            if note := table.footnote():
                console.print(Text(note, style="dim"))
        else:
            print(plain_text(table), file=console.file)


def show_lines(lines: Iterable[Text], console: Console | None = None) -> None:
    """Print lines without wrapping, in colour on a terminal."""
    console = console or Console(highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)


def plain_text(table: Table) -> str:
    """Return a title, and columns aligned by spaces."""
    columns = table.shown()
    widths = [_width(table, column) for column in columns]
    headings = zip_longest(*(_heading_lines(column, columns) for column in columns), fillvalue="")
    lines = [*headings, *([_cell(row, column) for column in columns] for row in table.rows)]
    aligned = [
        (" " * GAP)
        .join(
            text.ljust(width) if column.key else text.rjust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        )
        .rstrip()
        for line in lines
    ]
    return "\n".join([table.title, *aligned, *filter(None, [table.footnote()]), ""])


def markdown(title: str, record: Record, tables: Iterable[Table]) -> str:
    """Return a page with the results, their environment, and the command to reproduce them."""
    parts = [f"# {title}", "## Result"]
    for table in tables:
        columns = table.shown()
        head = [column.heading.replace("\n", " ") for column in columns]
        rule = [":--" if column.key else "--:" for column in columns]
        body = [[_cell(row, column).replace("|", "\\|") for column in columns] for row in table.rows]
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, rule, *body)]
        parts += [f"### {table.title}", "\n".join(lines), *filter(None, [table.footnote()])]
    facts = {"thinpipe": record.thinpipe, **record.environment}
    parts += ["## Environment", "\n".join(f"- {name}: {_fact(value)}" for name, value in facts.items() if value)]
    command = record.config.get("command")
    if command:
        parts += ["## To reproduce", f"```\n{shlex.join(command)}\n```"]
    return "\n\n".join(parts) + "\n"


def _fact(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return textwrap.indent(f"\n\n```\n{text}\n```", "  ") if "\n" in text else text


def _cell(row: Row, column: Column) -> str:
    value = row.get(column.name)
    if value is None:
        return "-"
    if value == 0:
        return "0"  # distinguishes exact zeros from values that round to zero
    return value if isinstance(value, str) else format(value, column.format)


def _heading_lines(column: Column, columns: Sequence[Column]) -> list[str]:
    """Return the lines of a heading, with empty ones above so that all headings end on the same line."""
    lines = column.heading.split("\n")
    return [""] * (max(other.heading.count("\n") for other in columns) + 1 - len(lines)) + lines


def _width(table: Table, column: Column) -> int:
    return max(map(len, (*column.heading.split("\n"), *(_cell(row, column) for row in table.rows))))


def _blocks(table: Table, width: int) -> Iterator[list[Column]]:
    """Yield columns in blocks that fit the width, each beginning with the key columns.

    Key columns that take more than half of the width are folded instead: texts remain readable when folded, numbers do
    not.
    """
    keys = [column for column in table.shown() if column.key]
    used = start = min(width // 2, sum(_width(table, column) + GAP for column in keys))
    block: list[Column] = []
    for column in (column for column in table.shown() if not column.key):
        needed = _width(table, column) + GAP
        if block and used + needed > width:
            yield [*keys, *block]
            block, used = [], start
        block.append(column)
        used += needed
    yield [*keys, *block]


def _rich_table(table: Table, columns: Sequence[Column]) -> RichTable:
    rich = RichTable(box=SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        heading = Text("\n".join(_heading_lines(column, columns)))
        rich.add_column(heading, justify="left" if column.key else "right", no_wrap=not column.key, overflow="fold")
    for row in table.rows:
        rich.add_row(*(Text(_cell(row, column), style=_style(table, row, column)) for column in columns))
    return rich


def _style(table: Table, row: Row, column: Column) -> str:
    return table.style(row, column) if table.style else _STYLES.get(_cell(row, column), "")
