"""Your own texts: a file of rows with one or two texts and a label."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinpipe.workloads.roberta import SMALL
from thinpipe.workloads.splits import split_fifth
from thinpipe.workloads.task import Data, Metric, Recipe, Shape, Source
from thinpipe.workloads.text import RobertaTask

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
Row = dict[str, str | None]


class TextTable(RobertaTask):
    """``FILE.csv`` or ``FILE.jsonl``; every fifth row validates."""

    name = "texts"
    summary = "your own texts, --data FILE.csv or .jsonl; small RoBERTa from scratch, or the one in --weights"
    metric: Metric = "accuracy"
    checkpoint = None
    size = SMALL
    recipe = Recipe(
        batch_size=32,
        chunks=4,
        epochs=10,
        optimizer="adamw",
        lr=5e-4,
        lr_schedule="polynomial",
        warmup=0.1,
        weight_decay=0.01,
        clip_norm=1.0,
        client_layers=(1, 1),
    )

    def look_for(self, source: Source) -> int:
        _reader(source.data)
        return super().look_for(source)

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Classes are the different labels, in order."""
        self.check(source)
        rows = _rows(source.data)
        columns = _columns(source.data, list(rows[0]))
        cells = [_cells(source.data, number, row, (*columns, LABEL)) for number, row in enumerate(rows, 1)]
        names = sorted({label for *_, label in cells}, key=_label_order)
        if len(names) < 2:
            raise ValueError(f"{source.data} should have two different labels or more; all rows say {names[0]!r}")
        texts = [tuple(each) for *each, _ in cells]
        labels = torch.tensor([names.index(label) for *_, label in cells])
        train, validation = split_fifth(len(rows))
        return self.tokenized(
            source,
            ([texts[index] for index in train.tolist()], labels[train]),
            ([texts[index] for index in validation.tolist()], labels[validation]),
        )


def _reader(path: Path | None) -> Callable[[], Iterator[Row]]:
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    if path is None or path.suffix.lower() not in readers or not path.is_file():
        got = "none was given" if path is None else f"{path} is {'another kind' if path.exists() else 'not there'}"
        raise ValueError(f"task texts needs --data FILE.csv or FILE.jsonl; {got}")
    return partial(readers[path.suffix.lower()], path)


def _rows(path: Path | None) -> list[Row]:
    rows = list(_reader(path)())
    if len(rows) < 2:
        raise ValueError(f"{path} should have two rows or more, one to train and one to validate; it has {len(rows)}")
    return rows


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey=_TOO_MANY)
        try:
            for row in reader:
                if _TOO_MANY in row:  # a comma in a text would make the rest of it the label
                    raise ValueError(f"{path}, line {reader.line_num} has more cells than the header; quote its texts")
                yield row
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from None


def _read_jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f'{path}, line {number} should be an object like {{"text": ..., "label": ...}}')
        yield {name: _text(value) for name, value in row.items()}


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _columns(path: Path | None, found: list[str]) -> tuple[str, ...]:
    for columns in TEXT_COLUMNS:
        if LABEL in found and all(name in found for name in columns):
            return columns
    known = "; ".join(", ".join(columns) for columns in TEXT_COLUMNS)
    raise ValueError(
        f"{path} has the columns {', '.join(found)}; it should have {LABEL}, and one or two texts, "
        f"their columns named as in one of: {known}"
    )


def _cells(path: Path | None, number: int, row: Row, names: tuple[str, ...]) -> list[str]:
    missing = [name for name in names if row.get(name) is None]
    if missing:
        raise ValueError(f"{path}, row {number} has no {' and no '.join(missing)}")
    return [cell for name in names if (cell := row[name]) is not None]


def _label_order(label: str) -> tuple[float, str]:
    """Numbers by value, then words by letter."""
    try:
        return float(label), label
    except ValueError:
        return float("inf"), label
