"""Results stay, whatever was under way when somebody was ended; a method is held against another seed by seed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from tests.lab.ablation.helpers import make_plan
from thinpipe.lab.ablation.plan import Run
from thinpipe.lab.ablation.results import Result, Store, p_value


def result_of(run: Run, metric: float | None = 0.9) -> Result:
    return Result(
        name=run.name,
        settings=run.settings,
        finished="2026-01-01T00:00:00+00:00",
        wall_s=1.0,
        threads=1,
        jobs=1,
        row=None if metric is None else {"metric": metric},
        error="it broke" if metric is None else None,
    )


def test_appended_results_are_read_again(tmp_path: Path) -> None:
    first, second = make_plan(tmp_path, "seed = [0, 1]").runs
    store = Store(tmp_path / "results.jsonl")
    store.append(result_of(first))
    again = Store(store.path)
    assert again.get(first) == result_of(first)
    assert again.get(second) is None


def test_a_retried_run_replaces_its_failure(tmp_path: Path) -> None:
    (run,) = make_plan(tmp_path, "seed = [0]").runs
    store = Store(tmp_path / "results.jsonl")
    store.append(result_of(run, None))
    store.append(result_of(run, 0.8))
    found = Store(store.path).get(run)
    assert found is not None
    assert not found.failed
    assert len(store.path.read_text().splitlines()) == 2  # nothing is thrown away


def test_results_of_other_settings_are_kept_apart(tmp_path: Path) -> None:
    before = make_plan(tmp_path, "seed = [0]", "epochs = 2").runs
    after = make_plan(tmp_path, "seed = [0]", "epochs = 3").runs
    store = Store(tmp_path / "results.jsonl")
    store.append(result_of(before[0]))
    assert store.get(after[0]) is None
    assert store.others(after) == 1
    assert store.others(before) == 0


def test_results_of_a_version_that_knew_fewer_settings_are_results(tmp_path: Path) -> None:
    (run,) = make_plan(tmp_path, "seed = [0]").runs
    older = {name: value for name, value in run.settings.items() if name not in ("amp", "clip_norm")}
    store = Store(tmp_path / "results.jsonl")
    store.append(replace(result_of(run), settings=older))
    assert Store(store.path).get(run) is not None
    (other,) = make_plan(tmp_path, "seed = [0]", "amp = true").runs
    assert Store(store.path).get(other) is None


def test_a_torn_line_costs_one_result_and_no_other(tmp_path: Path) -> None:
    runs = make_plan(tmp_path, "seed = [0, 1, 2]").runs
    store = Store(tmp_path / "results.jsonl")
    store.append(result_of(runs[0]))
    store.append(result_of(runs[1]))
    store.path.write_bytes(store.path.read_bytes()[:-20])
    store = Store(store.path)
    store.append(result_of(runs[2]))
    again = Store(store.path)
    assert [again.get(run) is not None for run in runs] == [True, False, True]
    assert again.damaged == 1


@pytest.mark.parametrize("form", [".999999999f", 3])
def test_results_whose_metric_cannot_be_written_are_refused(tmp_path: Path, form: object) -> None:
    store = Store(tmp_path / "results.jsonl")
    store.append(result_of(make_plan(tmp_path, "seed = [0]").runs[0]))
    store.path.write_text(json.dumps(json.loads(store.path.read_text()) | {"metric_format": form}))
    with pytest.raises(ValueError, match="line 1 is no result of an ablation"):
        Store(store.path)


def put_giant(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("make", [os.mkfifo, put_giant])
def test_invalid_results_are_rejected(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "results.jsonl")
    with pytest.raises(ValueError, match=r"results\.jsonl cannot be read as results: it (is a pipe|has 1\.1 TB)"):
        Store(tmp_path / "results.jsonl")


def test_one_ablation_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with Store(path).locked(), pytest.raises(ValueError, match="another ablation"), Store(path).locked():
        pass
    with Store(path).locked():
        pass


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"kind": "train"}\n')
    with pytest.raises(ValueError, match="line 1 is no result of an ablation"):
        Store(path)


@pytest.mark.parametrize(
    "line",
    ['{"format": 1, "x": 2}', '{"format": 1, "settings": [1]}', '{"format": 1, "settings": {}, "name": "a"}', "[1]"],
)
def test_lines_of_something_else_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=f"{path}, line 1 is no result of an ablation in format 1; name another file"):
        Store(path)


def test_nested_lines_are_damaged_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("[" * 100_000)
    assert Store(path).damaged == 1


def test_it_is_the_paired_t_test() -> None:
    ours, theirs = [0.97, 0.98, 0.96, 0.99, 0.975], [0.98, 0.985, 0.975, 0.985, 0.98]
    assert p_value(ours, theirs) == pytest.approx(ttest_rel(ours, theirs).pvalue)


def test_without_a_spread() -> None:
    assert p_value([0.5, 0.6], [0.5, 0.6]) == 1.0
    assert p_value([0.75, 0.5], [0.5, 0.25]) == 0.0


def test_one_seed_has_no_p_value() -> None:
    assert p_value([0.9], [0.8]) is None


def test_seeds_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        p_value([0.9, 0.8], [0.8])
