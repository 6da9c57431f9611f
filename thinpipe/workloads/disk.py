"""Data sets on disk, in the formats that the library ``datasets`` writes and the hub has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinpipe.workloads.hub import PublicData, datasets_library


def load_saved(path: Path, splits: tuple[str, ...], part: str | None = None) -> dict[str, Any]:
    """These splits of a folder: one that ``save_to_disk`` wrote, or one of parquet files as on the hub."""
    if not path.is_dir():
        raise ValueError(f"--data is a folder with a data set, and {path} is none")
    found = _saved_by_datasets(path) if (path / "dataset_dict.json").is_file() else _parquet(path, splits, part)
    missing = [split for split in splits if split not in found]
    if missing:
        raise ValueError(
            f"--data {path} needs the splits {', '.join(splits)}; it has {', '.join(found) or 'none'}. It should be a "
            f"folder of datasets' save_to_disk, or of parquet files named SPLIT-*.parquet as on the hub"
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


def _saved_by_datasets(path: Path) -> dict[str, Any]:
    return dict(datasets_library().load_from_disk(str(path)))


def _parquet(path: Path, splits: tuple[str, ...], part: str | None) -> dict[str, Any]:
    # Several data sets may share a repository, each in its folder: glue/rte, glue/cola.
    root = path / part if part and (path / part).is_dir() else path
    files = {
        split: sorted(str(file) for file in root.rglob("*.parquet") if file.stem.split("-")[0] == split)
        for split in splits
    }
    files = {split: each for split, each in files.items() if each}
    return dict(datasets_library().load_dataset("parquet", data_files=files)) if files else {}
