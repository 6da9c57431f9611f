"""Record <-> JSON: what ran, on what, and what came out, with units in the names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from thinpipe.measure.environment import environment
from thinpipe.measure.whole import temporary_beside, written_whole
from thinpipe.version import __version__

FORMAT = 1  # raised when a reader of the old shape would misread the new one

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One named figure of a row, described once for every table, page and comparison."""

    name: str  # its key in a row, unit included: encode_ms
    heading: str  # how a table heads it; a line break makes two lines
    format: str = ""  # of the number, as in format(value, ".2f")
    better: Literal["higher", "lower"] | None = None  # None: neither
    key: bool = False  # part of what the row is about, not a result


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim that a run held against what it measured."""

    claim: str
    measured: float | None
    limit: float
    bound: Literal["at most", "at least"] = "at most"
    unit: str = ""
    detail: str = ""  # where the worst case was
    required: bool = True  # False: a target that depends on the machine

    @property
    def passed(self) -> bool:
        if self.measured is None:
            return False
        # NaN passes neither comparison.
        return self.measured <= self.limit if self.bound == "at most" else self.measured >= self.limit


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything one run has to say."""

    kind: str  # what was measured; only records of one kind can be compared
    config: Mapping[str, Any]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    checks: tuple[Check, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=environment)
    thinpipe: str = __version__

    def write(self, path: Path) -> None:
        """Write the record whole or not at all."""
        data = _without_nonfinite({"format": FORMAT, **asdict(self)})
        with written_whole(path) as temporary:
            temporary.write_text(_dump(data))

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read what ``write`` wrote; ValueError for everything else."""
        rule = f"{path}: a record is a JSON file that `thinpipe ... --json FILE` wrote"
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(f"{rule}; it cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{rule}; this is not JSON or not all of it: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise ValueError(f"{rule}; this is other JSON, without a format number")
        if data["format"] > FORMAT:
            raise ValueError(
                f"{rule} in format {FORMAT} or older; this one is format {data['format']}, "
                f"from thinpipe {data.get('thinpipe')}: upgrade thinpipe"
            )
        try:
            return cls(
                kind=data["kind"],
                config=data["config"],
                columns=tuple(Column(**column) for column in data["columns"]),
                rows=tuple(data["rows"]),
                checks=tuple(Check(**check) for check in data["checks"]),
                environment=data["environment"],
                thinpipe=data["thinpipe"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{rule}; this one lacks or misnames a part: {error}") from None


def check_writable(path: Path) -> None:
    """ValueError unless a file can be put at ``path``: asked before a long run, not after it."""
    if path.is_dir():
        raise ValueError(f"{path}: results go to a file, this is a directory; name a file in it")
    if path.exists() and not path.is_file():  # renaming onto /dev/null would do away with it
        raise ValueError(f"{path}: results go to a file, this is a device or a pipe; name another")
    try:
        temporary = temporary_beside(path)
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise ValueError(
            f"{path}: results go to a file in a directory that can be written; {path.parent}: {error.strerror}"
        ) from None


def _dump(data: Mapping[str, Any]) -> str:
    """JSON with a line for every row, column and fact: readable, and a change of one row is a change of one line."""
    parts = []
    for name, value in data.items():
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(item, allow_nan=False) for item in value) + "\n ]"
        else:
            text = json.dumps(value, allow_nan=False)
        parts.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _without_nonfinite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, rather than losing the run that produced them."""
    if isinstance(value, Mapping):
        return {name: _without_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
