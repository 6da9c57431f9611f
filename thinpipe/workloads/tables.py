"""Your own texts: a file of rows with one or two texts and a label."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

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
Row = dict[str, str]


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

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Classes are the different labels, in order."""
        self.check(source)
        rows = _rows(source.data)
        columns = _columns(source.data, list(rows[0]))
        for number, row in enumerate(rows, 1):
            _check_row(source.data, number, row, (*columns, LABEL))
        names = sorted({row[LABEL] for row in rows}, key=_label_order)
        if len(names) < 2:
            raise ValueError(f"{source.data} should have two different labels or more; all rows say {names[0]!r}")
        texts = [tuple(row[column] for column in columns) for row in rows]
        labels = torch.tensor([names.index(row[LABEL]) for row in rows])
        train, validation = split_fifth(len(rows))
        return self.tokenized(
            source,
            ([texts[index] for index in train.tolist()], labels[train]),
            ([texts[index] for index in validation.tolist()], labels[validation]),
        )


def _rows(path: Path | None) -> list[Row]:
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    if path is None or path.suffix.lower() not in readers or not path.is_file():
        got = "none was given" if path is None else f"{path} is {'another kind' if path.exists() else 'not there'}"
        raise ValueError(f"task texts needs --data FILE.csv or FILE.jsonl; {got}")
    rows = list(readers[path.suffix.lower()](path))
    if len(rows) < 2:
        raise ValueError(f"{path} should have two rows or more, one to train and one to validate; it has {len(rows)}")
    return rows


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        yield from csv.DictReader(file)


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
        yield {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}


def _columns(path: Path | None, found: list[str]) -> tuple[str, ...]:
    for columns in TEXT_COLUMNS:
        if LABEL in found and all(name in found for name in columns):
            return columns
    known = "; ".join(", ".join(columns) for columns in TEXT_COLUMNS)
    raise ValueError(
        f"{path} has the columns {', '.join(found)}; it should have {LABEL}, and one or two texts, "
        f"their columns named as in one of: {known}"
    )


def _check_row(path: Path | None, number: int, row: Row, names: tuple[str, ...]) -> None:
    missing = [name for name in names if row.get(name) is None]
    if missing:
        raise ValueError(f"{path}, row {number} has no {' and no '.join(missing)}")


def _label_order(label: str) -> tuple[float, str]:
    """Numbers by value, then words by letter."""
    try:
        return float(label), label
    except ValueError:
        return float("inf"), label
