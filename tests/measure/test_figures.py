"""Figures declared once: columns and rows follow from the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from thinpipe.measure.figures import columns_of, figure, row_of
from thinpipe.measure.parts import parts_of
from thinpipe.measure.record import Column


@dataclass(frozen=True, kw_only=True)
class Inner:
    wait_ms: float = figure("wait\nms", format=".1f", better="lower")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str = figure("name", key=True)
    inner: Inner
    seen: int | None = figure("seen", format="d", default=None)
    details: list[int]


def test_columns_and_rows_follow_from_the_fields_in_their_order() -> None:
    assert columns_of(Outer) == (
        Column(name="name", heading="name", key=True),
        Column(name="wait_ms", heading="wait\nms", format=".1f", better="lower"),
        Column(name="seen", heading="seen", format="d"),
    )
    row = row_of(Outer(name="a", inner=Inner(wait_ms=2.0), details=[1]))
    assert list(row.items()) == [("name", "a"), ("wait_ms", 2.0), ("seen", None), ("details", [1])]


def test_encoding_is_the_senders_and_the_rest_the_receivers() -> None:
    sent, received = (
        SimpleNamespace(encode_ms=1.0 * k, wait_ms=10.0 * k, transfer_ms=100.0 * k, decode_ms=1000.0 * k)
        for k in (2, 4)
    )
    parts = parts_of(6.0, [sent], [received], steps=2)
    assert (parts.compute_ms, parts.encode_ms, parts.wait_ms) == (3.0, 1.0, 20.0)
    assert (parts.transfer_ms, parts.decode_ms) == (200.0, 2000.0)
