"""Seeds become rows: mean, spread, worst; failures are shown and never averaged away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.ablation.helpers import FAKE_TRAIN, make_plan
from tests.plots import shown
from thinpipe.lab.ablation.results import Store, method_row, methods, rows_of, to_record
from thinpipe.lab.ablation.runner import carry_out
from thinpipe.lab.ablation.summary import _line, plot_metric_against_bits, result_tables
from thinpipe.lab.records.diff import compare
from thinpipe.lab.records.report import plain_text


@pytest.fixture
def store(tmp_path: Path, fake_log: Path) -> Store:
    """Three seeds of three codecs; of the second all fail, of the third one has not been run."""
    store = Store(tmp_path / "results.jsonl")
    for result in carry_out(_runs(tmp_path)[:-1], train=FAKE_TRAIN):
        store.append(result)
    return store


def _runs(tmp_path: Path):
    return make_plan(tmp_path, 'compress = ["none", "uniform:1", "sort:3+1"]\nseed = [0, 1, 2]').runs


def test_a_row_has_mean_spread_and_worst_of_the_seeds(tmp_path: Path, store: Store) -> None:
    rows = [method_row(method) for method in methods(_runs(tmp_path), store)]
    assert [row["codec"] for row in rows] == ["none", "uniform:1", "sort:3+1"]
    assert rows[0]["accuracy_mean"] == pytest.approx(0.91)
    assert rows[0]["accuracy_std"] == pytest.approx(0.01)
    assert rows[0]["accuracy_worst"] == pytest.approx(0.9)
    assert rows[0]["wire_mb_per_step"] == pytest.approx(3.2)
    assert [(row["seeds_done"], row["seeds_failed"], row["seeds"]) for row in rows] == [(3, 0, 3), (0, 3, 3), (2, 0, 3)]
    assert rows[2]["accuracy_mean"] == pytest.approx(0.905)


def test_encode_and_decode_times_are_costs_and_earlier_results_lack_them(tmp_path: Path, store: Store) -> None:
    (method, *_) = methods(_runs(tmp_path), store)
    row = method_row(method)
    assert (row["encode_ms_per_step"], row["decode_ms_per_step"]) == (pytest.approx(3.0), pytest.approx(2.0))
    text = plain_text(result_tables([method])[0])
    assert text.splitlines()[3].split()[-2:] == ["3.00", "2.00"]
    times = ("encode_ms_per_step", "decode_ms_per_step")
    earlier = tuple(
        replace(each, row={name: value for name, value in (each.row or {}).items() if name not in times})
        for each in method.results
    )
    older = replace(method, results=earlier)
    assert method_row(older)["encode_ms_per_step"] is None
    assert "encode\n" not in plain_text(result_tables([older])[0])
    added = compare(to_record([older], {}), to_record([method], {}))
    assert [pair.change(column) for pair in added.pairs for column in added.columns if column.name in times] == [
        None
    ] * 2


def test_of_a_metric_that_should_be_low_the_worst_seed_is_the_highest(tmp_path: Path, store: Store) -> None:
    found = methods(_runs(tmp_path), store)[:1]
    lower = [replace(found[0], results=tuple(replace(each, metric_better="lower") for each in found[0].results))]
    assert method_row(lower[0])["accuracy_worst"] == pytest.approx(0.92)
    assert method_row(lower[0])["accuracy_best"] == pytest.approx(0.9)
    columns = {column.name: column.better for column in to_record(lower, {}).columns}
    assert columns["accuracy_mean"] == columns["accuracy_worst"] == "lower"
    low, high = plot_metric_against_bits("title", lower).y_ranges["digits, close to none"]
    assert high - 91 > 91 - low > 0


def test_methods_are_held_against_the_uncompressed_one(tmp_path: Path, store: Store) -> None:
    """Over the seeds that both have: two of the last method's, which the made-up training gives the same metric."""
    plain, failed, last = rows_of(methods(_runs(tmp_path), store))
    assert plain["p_value"] is failed["p_value"] is None
    assert last["minus_none"] == pytest.approx(0)
    assert last["p_value"] == 1.0
    assert last["loss_added"] == pytest.approx(0)
    worse = replace(store.get(_runs(tmp_path)[-2]), row={"metric": 0.9, "validation_loss": 7.0})
    store.append(worse)
    found = methods(_runs(tmp_path), store)
    assert rows_of(found)[-1]["loss_added"] > 1
    spread = rows_of(found)[-1]["loss_added_std"]
    assert f"+{rows_of(found)[-1]['loss_added']:.4f} ± {spread:.4f}" in plain_text(result_tables(found)[0])


def test_tables_list_failed_and_missing_runs(tmp_path: Path, store: Store) -> None:
    results, failed = result_tables(methods(_runs(tmp_path), store), waiting=1)
    text = plain_text(results)
    assert "91.0% ± 1.0%" in text
    assert "+0.0000 ± 0.0000" in text
    assert "0 of 3, 3 failed" in text
    assert "2 of 3" in text
    assert "without a result: 1." in text
    assert plain_text(failed).count("the loss is not finite at step 7") == 3


def test_the_plot_has_the_uncompressed_run_as_a_band(tmp_path: Path, store: Store) -> None:
    plot = plot_metric_against_bits("t", methods(_runs(tmp_path), store))
    assert plot.title == "t (3 failed runs are not in it)"
    assert plot.bands["digits"] == pytest.approx((91.0, 1.0))
    (point,) = plot.panels["digits"]["sort"]
    assert point == pytest.approx((3.0, 90.5, 90.0, 91.0))
    low, high = plot.y_ranges["digits, close to none"]
    assert low < 90 < 92 < high
    assert shown(plot.figure())["digits"]["sort"] == [pytest.approx((3.0, 90.5))]


def test_codecs_of_a_family_with_as_many_bits_have_lines_of_their_own(tmp_path: Path, fake_log: Path) -> None:
    # The made-up training counts 3, 3 and 6 bits.
    runs = make_plan(tmp_path, 'compress = ["sort:3+1", "sort:3+2", "sort:6+2"]').runs
    store = Store(tmp_path / "results.jsonl")
    for result in carry_out(runs, train=FAKE_TRAIN):
        store.append(result)
    plot = plot_metric_against_bits("t", methods(runs, store))
    assert {name: len(points) for name, points in plot.panels["digits"].items()} == {"sort": 2, "sort:3+2": 1}


@pytest.mark.parametrize(
    ("codec", "family"),
    [
        ("fp16", "fp16"),
        ("kmeans:2/sort:6+2", "kmeans/sort"),
        ("tile:2/64+sr/tile:4", "tile/tile"),
    ],
)
def test_lines_are_named_after_families(codec: str, family: str) -> None:
    assert _line(codec, 4.0, {}) == family


def test_two_records_of_an_ablation_can_be_compared(tmp_path: Path, store: Store) -> None:
    record = to_record(methods(_runs(tmp_path), store), {"title": "t"})
    record.write(tmp_path / "ablation.json")
    again = type(record).read(tmp_path / "ablation.json")
    diff = compare(record, again)
    assert diff.kind == "ablate"
    assert len(diff.pairs) == 3
    assert "accuracy_mean" in {column.name for column in diff.columns}
    assert record.environment["cpu"] == "a processor"  # that of the runs


def test_a_plan_of_which_all_failed_still_has_tables_and_a_plot(tmp_path: Path, fake_log: Path) -> None:
    runs = make_plan(tmp_path, 'compress = ["uniform:1"]').runs
    store = Store(tmp_path / "results.jsonl")
    for result in carry_out(runs, train=FAKE_TRAIN):
        store.append(result)
    found = methods(runs, store)
    assert "0 of 1, 1 failed" in plain_text(result_tables(found)[0])
    assert to_record(found, {}).rows[0]["seeds_failed"] == 1
    assert shown(plot_metric_against_bits("t", found).figure()) == {"digits": {}}
