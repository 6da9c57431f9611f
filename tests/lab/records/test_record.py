"""Records survive the way to disk and back, nothing else passes for one; figures are declared once."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from thinpipe.lab.records.record import FORMAT, Check, Column, Record, column, columns_of, row_of
from thinpipe.system.files import check_writable
from thinpipe.version import __version__


@pytest.fixture
def record():
    return Record(
        kind="test",
        config={"repeat": 3},
        columns=(
            Column(name="codec", heading="codec", key=True),
            Column(name="encode_ms", heading="encode\nms", format=".2f", better="lower"),
        ),
        rows=({"codec": "a", "encode_ms": 1.5}, {"codec": "b", "encode_ms": None}),
        checks=(Check(claim="small", measured=1.0, limit=2.0, unit=" s", detail="here", required=False),),
    )


def test_write_and_read_are_inverse(record, tmp_path):
    path = tmp_path / "record.json"
    record.write(path)
    assert Record.read(path) == record
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_records_version_and_environment(record):
    assert record.thinpipe == __version__
    assert {"python", "torch", "numpy", "cpu", "cores", "threads", "devices"} <= record.environment.keys()


def test_a_row_is_a_line(record, tmp_path):
    record.write(tmp_path / "record.json")
    lines = [line.strip().rstrip(",") for line in (tmp_path / "record.json").read_text().splitlines()]
    assert json.dumps(record.rows[0]) in lines


def test_non_finite_values_become_null(tmp_path):
    rows = ({"a": math.inf, "b": [math.nan, 1.0]},)
    checks = (Check(claim="c", measured=math.nan, limit=1),)
    Record(kind="test", config={}, columns=(), rows=rows, checks=checks).write(tmp_path / "r.json")
    read = Record.read(tmp_path / "r.json")
    assert read.rows == ({"a": None, "b": [None, 1.0]},)
    assert read.checks[0].measured is None
    assert not read.checks[0].passed


def test_a_write_that_fails_leaves_the_old_file(record, tmp_path):
    path = tmp_path / "record.json"
    path.write_text("old")
    broken = Record(kind="test", config={"not JSON": object()}, columns=(), rows=())
    with pytest.raises(TypeError):
        broken.write(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as a record, .*: Expecting value: line 1"),
        ("[1, 2]", "it has no format number"),
        ('{"rows": []}', "it has no format number"),
        (json.dumps({"format": FORMAT}), "it lacks kind"),
        (json.dumps({"format": FORMAT + 1, "thinpipe": "9.9"}), r"format \d+, from thinpipe 9.9, .* upgrade"),
    ],
    ids=["empty", "list", "no-format", "no-parts", "newer"],
)
def test_other_files_are_one_clear_error(text, message, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        Record.read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [1]}, "rows[0] should be an object, got 1"),
        ({"rows": {}}, "rows should be a list of objects, it is {}"),
        ({"rows": [{"ms": [1]}]}, "rows[0]: ms should be a number that reads as .1f, it is [1]"),
        ({"columns": [{"name": "a", "heading": 5}]}, "columns[0]: heading cannot be 5"),
        ({"columns": [{"name": "a"}]}, "columns[0] have no 'heading'"),
        ({"columns": [{"name": "a", "heading": "a", "format": ".1q"}]}, "columns[0]: format should be one of a number"),
        (
            {"columns": [{"name": "a", "heading": "a", "format": ".999999999f"}]},
            "columns[0]: format should be one of a number, as in .2f, of less than 100 characters",
        ),
        ({"columns": [{"name": "a", "heading": "a", "format": ">999999999.1f"}]}, "of less than 100 characters"),
        ({"columns": [{"name": "a", "heading": "a", "better": "more"}]}, "columns[0]: better cannot be 'more'"),
        ({"config": [1]}, "config should be an object, it is [1]"),
        ({"environment": "x"}, 'environment should be an object, it is "x"'),
        ({"checks": [3]}, "checks[0] should be an object, got 3"),
        ({"kind": None}, "kind should be a text, it is null"),
        ({"format": True}, "it has no format number"),
        ({"format": "1"}, "it has no format number"),
    ],
    ids=str,
)
def test_a_part_of_another_kind_is_named(change, message, tmp_path):
    path = tmp_path / "record.json"
    column = Column(name="ms", heading="ms", format=".1f")
    Record(kind="k", config={}, columns=(column,), rows=({"ms": 1.5},), environment={}).write(path)
    assert Record.read(path).rows == ({"ms": 1.5},)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"^{path} cannot be read as a record") as error:
        Record.read(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_truncated_record_is_an_error(record, tmp_path):
    path = tmp_path / "record.json"
    record.write(path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="cannot be read as a record"):
        Record.read(path)


def test_a_missing_record_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        Record.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("measured", "bound", "passed"),
    [
        (1, "at most", True),
        (2, "at most", True),
        (3, "at most", False),
        (3, "at least", True),
        (2, "at least", True),
        (1, "at least", False),
        (math.nan, "at most", False),
        (math.nan, "at least", False),
        (None, "at least", False),
    ],
)
def test_a_check_compares_a_value_with_its_bound(measured, bound, passed):
    assert Check(claim="c", measured=measured, limit=2, bound=bound).passed is passed


def test_writable_paths_are_checked_without_touching_them(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("kept")
    check_writable(path)
    assert path.read_text() == "kept"
    with pytest.raises(ValueError, match="is a directory"):
        check_writable(tmp_path)
    with pytest.raises(ValueError, match="No such file or directory"):
        check_writable(tmp_path / "none" / "out.json")


@dataclass(frozen=True, kw_only=True)
class Inner:
    wait_ms: float = column("wait\nms", format=".1f", better="lower")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str = column("name", key=True)
    inner: Inner
    seen: int | None = column("seen", format="d", default=None)
    details: list[int]


def test_columns_and_rows_follow_from_the_fields_in_their_order() -> None:
    assert columns_of(Outer) == (
        Column(name="name", heading="name", key=True),
        Column(name="wait_ms", heading="wait\nms", format=".1f", better="lower"),
        Column(name="seen", heading="seen", format="d"),
    )
    row = row_of(Outer(name="a", inner=Inner(wait_ms=2.0), details=[1]))
    assert list(row.items()) == [("name", "a"), ("wait_ms", 2.0), ("seen", None), ("details", [1])]


def test_nothing_in_a_record_from_elsewhere_controls_a_terminal(record, tmp_path):
    evil = "\x1b[2J\x1b]52;c;aGk=\x07\u202e"
    data = json.loads(record.to_json())
    data["kind"] = data["columns"][0]["heading"] = data["rows"][0]["codec"] = data["checks"][0]["claim"] = evil
    data["config"] = data["environment"] = {evil: {"nested": [evil]}}
    path = tmp_path / "evil.json"
    path.write_text(json.dumps(data))
    shown = repr(Record.read(path))
    assert "?[2J?]52;c;aGk=??" in shown
    assert not any(each in shown for each in ("\\x1b", "\\x07", "\\u202e"))
