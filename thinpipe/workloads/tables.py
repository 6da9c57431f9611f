"""Your own texts: a file of rows with one or two texts and a label."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinpipe.measure.files import read_data, read_jsonl
from thinpipe.options import OptionError
from thinpipe.workloads.roberta import SMALL
from thinpipe.workloads.splits import split_fifth
from thinpipe.workloads.task import Data, Metric, Recipe, Shape, Source
from thinpipe.workloads.text import RECIPE, TextTask

# Columns that hold texts, by name: the first of these that a file has.
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
_FEW_ROWS = 8  # of so many, each may well be of another class
_SHOWN = 200  # characters of a header that is none
Row = dict[str, str | None]
Line = tuple[int, Row]  # its number in the file, counted from 1


class TextTable(TextTask):
    """``FILE.csv`` or ``FILE.jsonl``; every fifth row validates."""

    name = "texts"
    summary = "your own texts, {data} FILE.csv or .jsonl; small RoBERTa from scratch, or any {model}"
    metric: Metric = "accuracy"
    checkpoint = None
    size = SMALL
    recipe = Recipe(
        batch_size=32,
        chunks=4,
        epochs=10,
        optimizer="adamw",
        lr=5e-4,
        lr_schedule="linear",
        warmup=0.1,
        weight_decay=0.01,
        clip_norm=1.0,
        client_layers=(1, 1),
    )
    model_recipe = replace(RECIPE, epochs=5, clip_norm=1.0, client_layers=(1, 1))

    def look_for(self, source: Source) -> int | None:
        _reader(source.data)
        return super().look_for(source)

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Classes are the different labels, in order."""
        self.check_options(source)
        rows = _rows(source.data)
        columns = _columns(source.data, list(rows[0][1]))
        cells = [_cells(source.data, line, (*columns, LABEL)) for line in rows]
        if not any(text.strip() for *each, _ in cells for text in each):
            nothing = f"{source.data}, line {rows[0][0]} and every other have no {' and no '.join(columns)}"
            raise ValueError(f"{nothing}; fill them in")
        names = sorted({label for *_, label in cells}, key=_label_order)
        _check_labels(source.data, names, len(rows))
        texts = [tuple(each) for *each, _ in cells]
        labels = torch.tensor([names.index(label) for *_, label in cells])
        train, validation = split_fifth(len(rows))
        return self.tokenized(
            source,
            ([texts[index] for index in train.tolist()], labels[train]),
            ([texts[index] for index in validation.tolist()], labels[validation]),
            names,
        )


def _reader(path: Path | None) -> Callable[[], Iterator[Line]]:
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    if path is None or path.suffix.lower() not in readers or not path.is_file():
        got = "none was given" if path is None else f"{path} is {'another kind' if path.exists() else 'not there'}"
        raise OptionError(f"task texts needs {{data}} FILE.csv or FILE.jsonl; {got}")
    return partial(readers[path.suffix.lower()], path)


def _rows(path: Path | None) -> list[Line]:
    rows = list(_reader(path)())
    if len(rows) < 2:
        raise ValueError(f"{path} should have two rows or more, one to train and one to validate; it has {len(rows)}")
    return rows


def _read_csv(path: Path) -> Iterator[Line]:
    # Strict: a quote that is never closed would make the rest of the file one text.
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
    names = ", ".join(found)
    raise ValueError(
        f"{path} has the columns {names if len(names) <= _SHOWN else names[:_SHOWN] + ' ...'}; it should have {LABEL}, "
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
    if not math.isfinite(_number(cells[-1]) or 0.0):
        raise ValueError(
            f"{path}, line {number}: a label is a word or a finite number; it is {cells[-1]}, as programs write "
            f"what is missing. Fill it in, or remove the line"
        )
    return cells


def _check_labels(path: Path | None, names: list[str], rows: int) -> None:
    if len(names) < 2:
        raise ValueError(f"{path} should have two different labels or more; all rows say {names[0]!r}")
    if len(names) == rows > _FEW_ROWS:
        raise ValueError(
            f"{path}: labels are classes, each of several rows; all {rows} rows have a label of their own, "
            f"as {names[0][:_SHOWN]!r}"
        )


def _label_order(label: str) -> tuple[float, str]:
    """Numbers by value, then words by letter."""
    number = _number(label)
    return float("inf") if number is None else number, label


def _number(label: str) -> float | None:
    try:
        return float(label)
    except ValueError:
        return None
