"""Plans in files: the options of a run, from which `thinpipe train` starts it."""

from pathlib import Path

import pytest

from tests.lab.plan.profiles import cluster, profile
from thinpipe.lab.plan.plan_file import Comparison, read_plan
from thinpipe.lab.plan.planning import Planned, settings_of
from thinpipe.lab.plan.predictor import Predictor
from thinpipe.lab.plan.profile import ModelProfile
from thinpipe.lab.plan.search import Limits, search
from thinpipe.lab.plan.verdict import judge
from thinpipe.lab.records.record import Record
from thinpipe.train.config_file import merge
from thinpipe.train.events import Finished
from thinpipe.train.resolve import resolve_run


def planned(limits: Limits | None = None, spread: float = 0.05) -> Planned:
    predictor = Predictor(profile(units=8, spread=spread), cluster(3, "10gbit,0.1ms"), 32)
    limits = limits or Limits(parallel=("pipeline",))
    return Planned("digits", {"task": "digits"}, judge(predictor, limits, search(predictor, limits)))


def test_a_plan_becomes_the_settings_of_a_run(tmp_path: Path) -> None:
    made = planned()
    made.record(["thinpipe", "plan"]).write(tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    best = made.verdict.best.candidate
    settings, _ = resolve_run(merge(plan.options, {"lr": 0.1, "epochs": None}))
    assert settings.cuts == best.cuts
    assert (settings.layout, settings.schedule, settings.chunks) == (best.layout, best.schedule, best.chunks)
    assert (settings.compress_forward, settings.compress_backward) == (best.forward, best.backward)
    assert (settings.workers, settings.batch_size, settings.lr) == (len(best.machines), 32, 0.1)
    assert settings.client_layers is None
    assert plan.low is not None
    assert plan.high is not None
    assert plan.low < plan.samples_per_s < plan.high


def test_one_process_is_a_plan_too(tmp_path: Path) -> None:
    planned(Limits(parallel=("none",)), spread=0.0).record([]).write(tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    settings, _ = resolve_run(plan.options)
    assert settings.parallel == "none"
    assert plan.low is None


def test_the_record_has_the_profile_for_a_later_plan() -> None:
    made = planned()
    facts = made.record([]).config["profile"]
    assert ModelProfile.from_json(facts) == made.verdict.predictor.profile


def test_other_records_are_rejected(tmp_path: Path) -> None:
    Record(kind="train", config={}, columns=(), rows=()).write(tmp_path / "run.json")
    with pytest.raises(ValueError, match="is a record of train, not of plan: give one of thinpipe plan"):
        read_plan(tmp_path / "run.json")


def test_the_end_of_a_run_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = planned()
    made.record([]).write(tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    speed = 0.9 * plan.samples_per_s
    common = {"steps": 1, "metric": 0.0, "best_metric": 0.0, "validation_loss": 0.0, "train_loss": 0.0}
    Comparison(plan).finished(Finished(**common, samples_per_s=speed, seconds=1.0, workers=(), links=()))
    assert f"measured: {speed:,.1f}, -10 %" in capsys.readouterr().out


def test_a_picture_of_the_predicted_step(tmp_path: Path) -> None:
    planned().draw(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_settings_of_a_plan_are_those_of_one_process() -> None:
    settings = settings_of({"batch_size": 64, "task": None, "config": None})
    assert (settings.task, settings.parallel, settings.batch_size) == ("digits", "none", 64)
