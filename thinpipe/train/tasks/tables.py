"""Your own texts: a file of rows with one or two texts and a label."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinpipe.system.files import read_data, read_jsonl
from thinpipe.train.tasks.roberta import SMALL
from thinpipe.train.tasks.sources import data_file
from thinpipe.train.tasks.splits import split_fifth
from thinpipe.train.tasks.task import Data, Metric, Shape, Source
from thinpipe.train.tasks.text import DEFAULTS, TextTask

# Names of the columns that hold texts: the first entry that a file has.
TEXT_COLUMNS = (
    ("text1", "text2"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "context"),
    ("question", "answer"),
    ("text",),
    ("sentence",),
    ("question",),
)
LABEL = "label"
_TOO_MANY = "cells without a column"
_FEW_ROWS = 8  # up to this many rows may each have their own class
_SHOWN = 200  # characters of an invalid header
Row = dict[str, str | None]
Line = tuple[int, Row]  # line number in the file, counted from 1, and the row


class TextTable(TextTask):
    """``FILE.csv`` or ``FILE.jsonl``; every fifth row validates, unless another file is given for validation."""

    name = "texts"
    summary = "your own texts, {data} FILE.csv or .jsonl; small RoBERTa from scratch, or any {model}"
    metric: Metric = "accuracy"
    checkpoint = None
    size = SMALL
    model_defaults = replace(DEFAULTS, epochs=5, clip_norm=1.0, client_layers=(1, 1))
    defaults = replace(model_defaults, epochs=10, lr=5e-4, warmup=0.1, weight_decay=0.01)  # from scratch

    places = ("data", "validation")

    def preflight(self, source: Source) -> int | None:
        _reader(source.data, "data")
        if source.validation is not None:
            _reader(source.validation, "validation")
        return super().preflight(source)

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Return rows as tokens; the classes are the labels of the data: numbers by value, then others by name."""
        self.check_options(source)
        table = _read_table(source.data, "data")
        names = sorted({label for *_, label in table.cells}, key=lambda label: (_number(label, math.inf), label))
        _check_labels(source.data, names, len(table.cells))
        if source.validation is None:
            train, validation = ([table.cells[n] for n in part.tolist()] for part in split_fifth(len(table.cells)))
        else:
            other = _read_table(source.validation, "validation")
            _check_labelled_alike(other, table, names)
            train, validation = table.cells, other.cells
        numbers = {name: number for number, name in enumerate(names)}
        parts = [
            ([tuple(texts) for *texts, _ in cells], torch.tensor([numbers[label] for *_, label in cells]))
            for cells in (train, validation)
        ]
        return self.tokenized(source, parts[0], parts[1], names)


@dataclass(frozen=True)
class _Table:
    """The rows of a file."""

    path: Path
    columns: tuple[str, ...]  # those that hold texts
    lines: Sequence[int]  # line number of every row
    cells: list[list[str]]  # one or two texts, and the label, of every row


def _read_table(path: Path | None, option: str) -> _Table:
    """Read the file that an option names; raise ValueError that names the line if a row cannot be used."""
    rows = list(_reader(path, option)())
    assert path is not None
    least = 2 if option == "data" else 1
    if len(rows) < least:
        wanted = "two rows or more, one to train and one to validate" if least == 2 else "a row or more"
        raise ValueError(f"{path} should have {wanted}; it has {len(rows)}")
    columns = _columns(path, list(rows[0][1]))
    cells = [_cells(path, line, (*columns, LABEL)) for line in rows]
    if not any(text.strip() for *each, _ in cells for text in each):
        missing = " and no ".join(columns)
        raise ValueError(f"{path}, line {rows[0][0]} and every other have no {missing}; fill them in")
    return _Table(path, columns, [number for number, _ in rows], cells)


def _check_labelled_alike(validation: _Table, table: _Table, names: Sequence[str]) -> None:
    """Raise ValueError unless validation rows have the columns and labels of the training rows."""
    if validation.columns != table.columns:
        raise ValueError(
            f"{validation.path} has its texts in {', '.join(validation.columns)}, and {table.path}, to train with, in "
            f"{', '.join(table.columns)}; name the columns alike"
        )
    known = set(names)
    for line, (*_, label) in zip(validation.lines, validation.cells, strict=True):
        if label not in known:
            raise ValueError(
                f"{validation.path}, line {line}: no row of {table.path}, to train with, has the label "
                f"{label[:_SHOWN]!r}; its labels are {_shortened(names)}"
            )


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."


def _reader(path: Path | None, option: str) -> Callable[[], Iterator[Line]]:
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    file = data_file(path, "texts", option, *readers)
    return partial(readers[file.suffix.lower()], file)


def _read_csv(path: Path) -> Iterator[Line]:
    # Strict: an unclosed quote would make the rest of the file one text.
    reader = csv.DictReader(io.StringIO(read_data(path, "a table"), newline=""), restkey=_TOO_MANY, strict=True)
    try:
        twice = [name for name, times in Counter(reader.fieldnames or ()).items() if times > 1]
        if twice:
            raise ValueError(f"{path}, line 1 names the column {twice[0]} twice; rename one")
        for row in reader:
            if _TOO_MANY in row:  # a comma in a text would make the rest of it the label
                raise ValueError(f"{path}, line {reader.line_num} has more cells than the header; quote its texts")
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num + 1}: {error} in the row that begins here; close its quotes, or correct it"
        ) from None


def _read_jsonl(path: Path) -> Iterator[Line]:
    for number, row in read_jsonl(path, "a table of JSON lines"):
        if not isinstance(row, dict):
            raise ValueError(f'{path}, line {number} should be an object like {{"text": ..., "label": ...}}')
        yield number, {name: _text(path, number, name, value) for name, value in row.items()}


def _text(path: Path, number: int, name: str, value: Any) -> str | None:
    if isinstance(value, list | dict) and (name == LABEL or any(name in names for names in TEXT_COLUMNS)):
        raise ValueError(f"{path}, line {number}: {name} should be a text or a number; it is a {type(value).__name__}")
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _columns(path: Path | None, found: list[str]) -> tuple[str, ...]:
    for columns in TEXT_COLUMNS:
        if LABEL in found and all(name in found for name in columns):
            return columns
    known = "; ".join(", ".join(columns) for columns in TEXT_COLUMNS)
    raise ValueError(
        f"{path} has the columns {_shortened(found)}; it should have {LABEL}, "
        f"and one or two texts, their columns named as in one of: {known}. The first line of a .csv names them, "
        f"separated by commas"
    )


def _cells(path: Path | None, line: Line, names: tuple[str, ...]) -> list[str]:
    number, row = line
    missing = [name for name in names if row.get(name) is None or (name == LABEL and not str(row[name]).strip())]
    if missing:
        raise ValueError(f"{path}, line {number} has no {' and no '.join(missing)}; fill it in, or remove the line")
    cells = [cell for name in names if (cell := row[name]) is not None]
    for name, cell in zip(names, cells, strict=True):
        try:
            cell.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{path}, line {number}: {name} has half a character (a lone surrogate)") from None
    if not math.isfinite(_number(cells[-1], 0.0)):
        raise ValueError(
            f"{path}, line {number}: a label is a word or a finite number; it is {cells[-1]}, as programs write "
            f"what is missing. Fill it in, or remove the line"
        )
    return cells


def _check_labels(path: Path | None, names: list[str], rows: int) -> None:
    if len(names) < 2:
        raise ValueError(f"{path} should have two different labels or more; all rows have {names[0]!r}")
    if len(names) == rows > _FEW_ROWS:
        raise ValueError(
            f"{path}: labels are classes, each of several rows; all {rows} rows have a label of their own, "
            f"as {names[0][:_SHOWN]!r}"
        )


def _number(label: str, default: float) -> float:
    try:
        return float(label)
    except ValueError:
        return default
