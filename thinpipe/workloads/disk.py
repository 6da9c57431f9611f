"""Data sets on disk, in the formats that the library ``datasets`` writes and the hub has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinpipe.measure.readable import check_regular, errors_named
from thinpipe.options import OptionError
from thinpipe.workloads.hub import PublicData, datasets_library

MOST_CLASSES = 100_000  # a classifier for more is a mistake: ids, or times, in place of labels


def load_saved(path: Path, splits: tuple[str, ...], part: str | None = None) -> dict[str, Any]:
    """These splits of a folder: one that ``save_to_disk`` wrote, or one of parquet files as on the hub."""
    if not path.is_dir():
        raise OptionError(f"{{data}} is a folder with a data set, and {path} is none")
    found = _saved_by_datasets(path) if (path / "dataset_dict.json").is_file() else _parquet(path, splits, part)
    missing = [split for split in splits if split not in found]
    if missing:
        raise OptionError(
            f"{{data}} {path} needs the splits {', '.join(splits)}; it has {', '.join(found) or 'none'}. It should be "
            "a folder of datasets' save_to_disk, or of parquet files named SPLIT-*.parquet as on the hub"
        )
    return {split: found[split] for split in splits}


def columns_of(path: Path | None, data: PublicData, rows: Any, names: tuple[str, ...]) -> None:
    """ValueError if a split has not these columns."""
    missing = [name for name in names if name not in rows.column_names]
    if missing:
        raise ValueError(
            f"{path or data.repository} should have the columns {', '.join(names)}, as {data.repository} has; "
            f"it has {', '.join(rows.column_names)}"
        )


def class_numbers(where: Path | str, column: str, values: Sequence[Any]) -> Tensor:
    """A column of labels as a tensor; ValueError that names the row if one is no class."""
    for number, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_CLASSES:
            raise ValueError(
                f"{where}: {column} holds numbers of classes, 0 to {MOST_CLASSES - 1}; row {number} has {value!r}. "
                f"Remove the row, or number the classes from 0"
            )
    return torch.tensor(values)


def _saved_by_datasets(path: Path) -> dict[str, Any]:
    datasets = datasets_library()
    with errors_named(path, "a data set that save_to_disk wrote", "bring the whole folder, or name another"):
        return dict(datasets.load_from_disk(str(path)))


def _parquet(path: Path, splits: tuple[str, ...], part: str | None) -> dict[str, Any]:
    # Several data sets may share a repository, each in its folder: glue/rte, glue/cola.
    root = path / part if part and (path / part).is_dir() else path
    files = {
        split: sorted(str(file) for file in root.rglob("*.parquet") if file.stem.split("-")[0] == split)
        for split in splits
    }
    files = {split: each for split, each in files.items() if each}
    if not files:
        return {}
    datasets = datasets_library()
    for file in (Path(name) for each in files.values() for name in each):
        _check_parquet(file)
    with errors_named(root, "parquet files", "bring them anew, or name another folder"):
        return dict(datasets.load_dataset("parquet", data_files=files))


def _check_parquet(file: Path) -> None:
    """ValueError if a file's start or end is not parquet's: ``datasets`` would not say which file it was."""
    from pyarrow.parquet import read_metadata  # type: ignore[import-untyped]

    check_regular(file, "parquet")
    with errors_named(file, "parquet", "bring it anew"):
        read_metadata(file)
