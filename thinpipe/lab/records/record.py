"""Records of runs as JSON: configuration, environment and results, with units in the names.

A row is a dataclass whose fields declare the columns:

@dataclass(frozen=True, kw_only=True)
class Sent:
    codec: str = column("codec", key=True)
    encode_ms: float = column("encode\\nms", format=".2f", better="lower")

Record(..., columns=columns_of(Sent), rows=(row_of(Sent(codec="none", encode_ms=1.5)),))
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from thinpipe.lab.records.environment import environment
from thinpipe.options import from_facts
from thinpipe.system.files import OutputError, read_json, replace_file, write_output
from thinpipe.system.sanitize import printable_json
from thinpipe.version import __version__

FORMAT = 1  # incremented when a reader of the old format would misread the new one

_KINDS: dict[str, tuple[type, str]] = {  # the fields of a record in JSON
    **dict.fromkeys(("kind", "thinpipe"), (str, "a text")),
    **dict.fromkeys(("config", "environment"), (dict, "an object")),
    **dict.fromkeys(("columns", "rows", "checks"), (list, "a list of objects")),
}

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A named column of a row, described once for all tables, pages and comparisons."""

    name: str  # its key in a row, unit included: encode_ms
    heading: str  # heading in tables; a line break makes two lines
    format: str = ""  # format of the number, as in format(value, ".2f")
    better: Literal["higher", "lower"] | None = None  # None: neither
    key: bool = False  # identifies the row; not a result


@dataclass(frozen=True, kw_only=True)
class Check:
    """A claim about a measured value and its limit."""

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
    """The configuration, environment, results and checks of a run."""

    kind: str  # kind of measurement; only records of one kind can be compared
    config: Mapping[str, Any]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    checks: tuple[Check, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=environment)
    thinpipe: str = __version__

    def to_json(self) -> str:
        """Return the record as the JSON of its file."""
        return _dump(_without_nonfinite({"format": FORMAT, **asdict(self)}))

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        text = self.to_json()
        with replace_file(path) as temporary:
            temporary.write_text(text)

    def write_or_print(self, path: Path) -> None:
        """Write the record and report it on stderr; if that fails, print it on stdout and raise OutputError."""
        try:
            write_output(path, lambda temporary: temporary.write_text(self.to_json()))
        except OutputError as error:
            print(self.to_json(), flush=True)
            raise OutputError(f"{error}; the record is on stdout instead") from None

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record; raise ValueError that names the file and the error in it."""
        what = "a record, a JSON file that `thinpipe ... --json FILE` wrote"
        data = printable_json(read_json(path, what, finite=True))  # untrusted, and printed on terminals
        try:
            return cls(**_parse(data))
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as {what}: {error}; make it anew, or name another") from None


def _dump(data: Mapping[str, Any]) -> str:
    """Return JSON with a line per row, column and fact: readable, and a change of one row is a change of one line."""
    parts = []
    for name, value in data.items():
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(item, allow_nan=False) for item in value) + "\n ]"
        else:
            text = json.dumps(value, allow_nan=False)
        parts.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _without_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null, so that the run's results are not lost."""
    if isinstance(value, Mapping):
        return {name: _without_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(data: Any) -> dict[str, Any]:
    """Return the checked fields of a record; raise ValueError that names an invalid one."""
    if not isinstance(data, dict) or type(data.get("format")) is not int or data["format"] < 1:
        raise ValueError("it has no format number")
    if data["format"] > FORMAT:
        raise ValueError(
            f"it is in format {data['format']}, from thinpipe {data.get('thinpipe')}, and this one reads format "
            f"{FORMAT} or older: upgrade thinpipe"
        )
    for name, (kind, text) in _KINDS.items():
        if name not in data:
            raise ValueError(f"it lacks {name}")
        if not isinstance(data[name], kind):
            raise ValueError(f"{name} should be {text}, it is {_shown(data[name])}")
    columns = tuple(from_facts(Column, item, f"columns[{i}]") for i, item in enumerate(data["columns"]))
    for i, column in enumerate(columns):
        if not is_number_format(column.format):
            raise ValueError(
                f"columns[{i}]: format should be one of a number, as in .2f, of less than 100 characters; it is "
                f"{_shown(column.format)}"
            )
    for i, row in enumerate(data["rows"]):
        _check_row(f"rows[{i}]", row, columns)
    checks = tuple(from_facts(Check, item, f"checks[{i}]") for i, item in enumerate(data["checks"]))
    return {name: data[name] for name in _KINDS} | {"columns": columns, "rows": tuple(data["rows"]), "checks": checks}


def is_number_format(text: Any) -> bool:
    """Return True if a number format is valid and does not produce gigabytes, as .999999999f would."""
    if not isinstance(text, str) or re.search(r"\d{3}", text):
        return False
    try:
        format(1, text)
    except ValueError:
        return False
    return True


def _check_row(where: str, row: Any, columns: Sequence[Column]) -> None:
    """Raise ValueError unless all values can be formatted as their columns require."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} should be an object, got {_shown(row)}")
    for column in columns:
        value = row.get(column.name)
        if value is None or isinstance(value, str) or not column.format:
            continue
        try:
            format(value, column.format)
        except (TypeError, ValueError):
            raise ValueError(
                f"{where}: {column.name} should be a number that reads as {column.format}, it is {_shown(value)}"
            ) from None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def column(
    heading: str,
    *,
    format: str = "",
    better: Literal["higher", "lower"] | None = None,
    key: bool = False,
    default: Any = MISSING,
) -> Any:
    """Return a dataclass field that declares a column; its name, with unit, is the column's."""
    return field(
        default=default, metadata={"column": {"heading": heading, "format": format, "better": better, "key": key}}
    )


def columns_of(kind: type) -> tuple[Column, ...]:
    """Return a column per ``column`` field, including nested dataclasses; other fields have no column."""
    hints = get_type_hints(kind)
    columns: list[Column] = []
    for each in fields(kind):
        if "column" in each.metadata:
            columns.append(Column(name=each.name, **each.metadata["column"]))
        elif is_dataclass(hints[each.name]):
            columns += columns_of(hints[each.name])
    return tuple(columns)


def row_of(columns: Any) -> dict[str, Any]:
    """Return the fields of a row as a flat dict, including those of nested dataclasses."""
    row: dict[str, Any] = {}
    for each in fields(columns):
        value = getattr(columns, each.name)
        row |= row_of(value) if is_dataclass(value) else {each.name: value}
    return row
