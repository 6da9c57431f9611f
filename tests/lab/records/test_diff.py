"""Comparing two records: what is matched, how far figures moved, what counts as worse."""

import math

import pytest

from thinpipe.lab.records.diff import Pair, compare, to_record
from thinpipe.lab.records.record import Column, Record

KEY = Column(name="codec", heading="codec", key=True)
TIME = Column(name="encode_ms", heading="encode\nms", format=".2f", better="lower")
SPEED = Column(name="gb_per_s", heading="GB/s", format=".1f", better="higher")
COPY = Column(name="copy_ms", heading="copy\nms", format=".2f")


def record(*rows, columns=(KEY, TIME, SPEED, COPY), kind="test", **config):
    return Record(kind=kind, config=config, columns=columns, rows=rows, environment={"torch": "2.13"})


def row(codec, encode_ms=1.0, gb_per_s=1.0, copy_ms=1.0):
    return {"codec": codec, "encode_ms": encode_ms, "gb_per_s": gb_per_s, "copy_ms": copy_ms}


@pytest.mark.parametrize(
    ("before", "after", "change", "worse_if_lower", "worse_if_higher"),
    [
        (100, 105, 0.05, 0.05, -0.05),
        (100, 50, -0.5, -0.5, 0.5),
        (-4.0, -5.0, -0.25, -0.25, 0.25),
        (0, 0, 0, 0, 0),
        (0, 2, math.inf, math.inf, -math.inf),
        (0, -2, -math.inf, -math.inf, math.inf),
        (3, None, None, math.inf, math.inf),
        (None, 3, None, None, None),
        (None, None, None, None, None),
        ("3", 3, None, None, None),
    ],
)
def test_changes_and_the_sense_of_better(before, after, change, worse_if_lower, worse_if_higher):
    names = ("encode_ms", "gb_per_s", "copy_ms")
    pair = Pair(baseline=dict.fromkeys(names, before), test=dict.fromkeys(names, after))
    assert pair.change(TIME) == change
    assert pair.worsening(TIME) == worse_if_lower
    assert pair.worsening(SPEED) == worse_if_higher
    assert pair.worsening(COPY) is None


def test_rows_are_matched_by_key_whatever_their_order():
    diff = compare(record(row("a"), row("b"), row("gone")), record(row("new"), row("b", 2.0), row("a", 3.0)))
    assert [(pair.baseline["codec"], pair.change(TIME)) for pair in diff.pairs] == [("b", 1.0), ("a", 2.0)]
    assert diff.only_baseline == ("gone",)
    assert diff.only_test == ("new",)


def test_rows_with_one_key_are_matched_in_their_order():
    diff = compare(record(row("a", 1.0), row("a", 2.0)), record(row("a", 2.0), row("a", 2.0), row("a")))
    assert [pair.change(TIME) for pair in diff.pairs] == [1.0, 0.0]
    assert diff.only_test == ("a",)


def test_columns_of_one_record_alone_are_named():
    diff = compare(record(row("a")), record(row("a"), columns=(KEY, TIME, COPY)))
    assert diff.columns == (TIME,)
    assert diff.only_baseline == ("column gb_per_s",)


def test_chosen_columns_may_be_neither_better_nor_worse():
    assert compare(record(row("a")), record(row("a")), ["copy_ms"]).columns == (COPY,)


def test_facts_mark_differences_and_skip_the_command():
    before = record(row("a"), repeat=3, command=["x"], old=1)
    facts = compare(before, record(row("a"), repeat=4, command=["y"])).facts
    assert [(fact.name, fact.baseline, fact.test, fact.differs) for fact in facts] == [
        ("old", 1, None, True),
        ("repeat", 3, 4, True),
        ("thinpipe", before.thinpipe, before.thinpipe, False),
        ("torch", "2.13", "2.13", False),
    ]


def test_the_check_names_the_worst_metric():
    diff = compare(record(row("a"), row("b")), record(row("a", 1.04), row("b", 1.0, 0.9)))
    check = diff.check(0.05)
    assert check.measured == pytest.approx(10)
    assert check.detail == "gb_per_s of b"
    assert not check.passed
    assert diff.check(0.11).passed


def test_better_and_neutral_metrics_never_fail():
    diff = compare(record(row("a")), record(row("a", 0.1, 10.0, 99.0)))
    assert diff.check(0).passed


def test_a_record_against_itself_is_all_zeros():
    same = record(row("a"), row("b", 0.0, -2.0))
    diff = compare(same, same)
    assert all(pair.change(column) == 0 for pair in diff.pairs for column in diff.columns)
    assert not any(fact.differs for fact in diff.facts)
    assert diff.only_baseline == diff.only_test == ()
    assert diff.check(0).passed


@pytest.mark.parametrize(
    ("test", "columns", "message"),
    [
        (record(row("a"), kind="other"), [], "of one kind can be compared; got 'test' and 'other'"),
        (record(row("z")), [], "matched by codec, and no row"),
        (record(row("a")), ["speed"], "encode_ms, gb_per_s, copy_ms; got 'speed'"),
        (record(row("a")), ["codec"], "got 'codec'"),
    ],
    ids=["kinds", "no-row", "no-column", "key-column"],
)
def test_incomparable_records_are_an_error(test, columns, message):
    with pytest.raises(ValueError, match=message):
        compare(record(row("a")), test, columns)


def test_a_diff_is_kept_as_a_record(tmp_path):
    diff = compare(record(row("a", 4.0), repeat=1), record(row("a", 5.0), repeat=2))
    to_record(diff, [diff.check(0.05)], {}).write(tmp_path / "diff.json")
    kept = Record.read(tmp_path / "diff.json")
    assert kept.kind == "diff of test"
    assert kept.rows[0] == {
        "codec": "a",
        "column": "encode_ms",
        "baseline": 4.0,
        "test": 5.0,
        "change_percent": 25.0,
        "worse_percent": 25.0,
    }
    assert kept.config["facts_that_differ"] == {"repeat": [1, 2]}
    assert not kept.checks[0].passed
