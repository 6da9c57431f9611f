"""Figures declared once: a row of a record is a dataclass, and its columns follow from its fields.

@dataclass(frozen=True, kw_only=True)
class Sent:
    codec: str = figure("codec", key=True)
    encode_ms: float = figure("encode\\nms", format=".2f", better="lower")

Record(..., columns=columns_of(Sent), rows=(row_of(Sent(codec="none", encode_ms=1.5)),))
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, Literal, get_type_hints

from thinpipe.measure.record import Column


def figure(
    heading: str,
    *,
    format: str = "",
    better: Literal["higher", "lower"] | None = None,
    key: bool = False,
    default: Any = MISSING,
) -> Any:
    """A field whose name, unit included, is that of a column; the rest is as in ``Column``."""
    return field(
        default=default, metadata={"column": {"heading": heading, "format": format, "better": better, "key": key}}
    )


def columns_of(kind: type) -> tuple[Column, ...]:
    """A column for every figure, those of dataclasses in it included; other fields stay in the row alone."""
    hints = get_type_hints(kind)
    columns: list[Column] = []
    for each in fields(kind):
        if "column" in each.metadata:
            columns.append(Column(name=each.name, **each.metadata["column"]))
        elif is_dataclass(hints[each.name]):
            columns += columns_of(hints[each.name])
    return tuple(columns)


def row_of(figures: Any) -> dict[str, Any]:
    """The figures by their names, as a table or a record has them; those of a dataclass in it stand beside the rest."""
    row: dict[str, Any] = {}
    for each in fields(figures):
        value = getattr(figures, each.name)
        row |= row_of(value) if is_dataclass(value) else {each.name: value}
    return row
