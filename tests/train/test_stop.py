"""Runs that are asked to stop: the step under way is completed and saved, and the resumed run ends as undisturbed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.scripts import run_script
from tests.train import scenario
from tests.train.toy import Recorder, ToyTask, run_toy, settings_for, train_toy, world_in
from thinpipe.comm.errors import StoppedTogether
from thinpipe.train.checkpoints import interval
from thinpipe.train.checkpoints.folder import checkpoints, newest
from thinpipe.train.checkpoints.manifest import read_manifest
from thinpipe.train.events import Step
from thinpipe.train.running import RunOptions
from thinpipe.train.worker import train

SCENARIO = str(scenario.__file__)
SIGNALS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")]
SIGNALS += [(signal.SIGHUP, 129, "ended by SIGHUP")]
EPOCHS = 1000  # 4 steps each: far more than run before the signal

pytestmark = pytest.mark.timeout(240)


def stop_scenario(saved: Path, when: Callable[[], bool], number: signal.Signals, **facts: Any) -> tuple[int, str]:
    """Run the scenario and signal it as soon as ``when`` holds."""
    facts = {"save": str(saved), "compress_forward": "none", "epochs": EPOCHS, **facts}
    return run_script(SCENARIO, json.dumps(facts), limit_s=170, interrupt_when=when, interrupt_with=number)


@pytest.mark.parametrize(
    ("number", "code", "text", "spec"),
    [(*each, spec) for each, spec in zip(SIGNALS, ("power:4", "tile:4+sr", "axes:2+now"), strict=True)],
    ids=["ctrl-c", "sigterm", "sighup"],
)
def test_a_signal_saves_the_step_and_the_resumed_run_ends_as_undisturbed(
    pool: Pool, tmp_path: Path, number: signal.Signals, code: int, text: str, spec: str
) -> None:
    """Steps are longer than the grace that a process has elsewhere; the end of an epoch saves, too, 4 steps apart."""
    saved = tmp_path / "saved"
    facts = {"compress_forward": spec, "save_every": None, "slow": 0.1, "grace": 0.05}
    ended, output = stop_scenario(saved, lambda: len(checkpoints(saved)) > 0, number, **facts)
    assert ended == code, output
    assert "Traceback" not in output
    assert f"thinpipe: {text}\n" in output
    last = checkpoints(saved)[-1]
    assert f"the last checkpoint is {last}; go on with: thinpipe train --resume {saved}" in output
    assert output.count("step-") == 1
    step = read_manifest(last).progress.step
    given = {"compress_forward": spec, "epochs": EPOCHS}
    rest = pool.run(train_toy, 2, "dropout", RunOptions(resume=saved, steps=step + 3), given)[0]
    whole = pool.run(train_toy, 2, "dropout", RunOptions(steps=step + 3), given)[0]
    assert [each.step for each in rest.steps] == [step + 1, step + 2, step + 3]
    assert rest.end.parameters_sha256 == whole.end.parameters_sha256


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    """In a step that never ends."""
    saved, first_at = tmp_path / "saved", []
    marker = tmp_path / "in_step"

    def second() -> bool:
        if not first_at and marker.exists():
            os.kill(int(marker.read_text()), signal.SIGTERM)
            first_at.append(time.monotonic())
        return bool(first_at) and time.monotonic() - first_at[0] > 1.5

    facts = {"slow": 1000, "marker": str(marker)}
    ended, output = stop_scenario(saved, second, signal.SIGTERM, **facts)
    assert ended == 143, output
    assert "thinpipe: waiting for the workers to stop; a second signal ends the run at once\n" in output
    assert output.endswith("thinpipe: ended by SIGTERM\nthinpipe: no checkpoint was written\n")


class Signaller(Recorder):
    """Signals its own process during a step, and during the evaluation after it."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.at = step

    def stepped(self, step: Step) -> None:
        super().stepped(step)
        if step.step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def stop_toy(step: int, running: RunOptions, parallel: str) -> Recorder:
    """Run the toy in this process until it is stopped; return what its listener received."""
    recorder = Signaller(step)
    settings = settings_for(ToyTask("dropout"), None, parallel=parallel, epochs=3)
    train(ToyTask("dropout"), settings, running, world_in(None), lambda: recorder)
    return recorder


@pytest.mark.parametrize(("at", "stopped"), [(2, 3), (3, 4), (4, 4), (11, 12)])
def test_last_step_of_a_stopped_run(tmp_path: Path, at: int, stopped: int) -> None:
    """A signal in step 4 arrives before the evaluation that follows it; after step 11 only the last is left."""
    if stopped == 12:
        assert stop_toy(at, RunOptions(save=tmp_path), "none").end is not None
        assert read_manifest(newest(tmp_path)).progress.is_complete
        return
    with pytest.raises(StoppedTogether):
        stop_toy(at, RunOptions(save=tmp_path, save_every=100), "none")
    progress = read_manifest(newest(tmp_path)).progress
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{stopped:08d}"]
    assert (progress.step, progress.metric == progress.metric) == (stopped, stopped == 4)  # evaluated after step 4


def test_without_a_folder_nothing_is_saved_and_the_output_reports_it(tmp_path: Path) -> None:
    facts = {"save": None, "slow": 0.1, "marker": str(tmp_path / "in_step")}
    ended, output = stop_scenario(tmp_path / "saved", (tmp_path / "in_step").exists, signal.SIGTERM, **facts)
    assert ended == 143, output
    assert "thinpipe: no checkpoint was written; name a folder for checkpoints with --save DIR\n" in output


class Clock:
    """Stands in for the module ``time``: each look at it is later by the same number of seconds."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = -step_s, step_s

    def monotonic(self) -> float:
        self.now += self.step_s
        return self.now


def train_by_clock(group: Any, running: RunOptions, step_s: float) -> list[str]:
    """Train with a clock that only runs on the client; return the names of the checkpoints it was told of."""
    patch = pytest.MonkeyPatch()
    patch.setattr(interval, "time", Clock(step_s if group.rank() == 0 else 0))
    try:
        return [Path(path).name for path in run_toy(group, ToyTask(), running).paths]
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("every", "step_s", "steps"), [("5min", 60, (5, 8)), (None, 200, (3, 4, 7, 8)), (3, 1e6, (3, 6, 8))]
)
def test_the_clients_clock_decides_when_to_save(
    pool: Pool, tmp_path: Path, every: int | str | None, step_s: float, steps: tuple[int, ...]
) -> None:
    """After a time; by default after ten minutes and at the end of an epoch of 4 steps; or after a number of steps."""
    names = pool.run(train_by_clock, 2, RunOptions(save=tmp_path, save_every=every, keep=9, keep_best=False), step_s)[0]
    assert names == [f"step-{step:08d}" for step in steps]
    assert [path.name for path in checkpoints(tmp_path)] == names
    assert read_manifest(newest(tmp_path)).options.save_every == every


@pytest.mark.parametrize("interval", [0, -1, "0s", "10", "10m", "min", "1e9h", "", "1.2345s"])
def test_intervals_that_are_none(interval: int | str) -> None:
    with pytest.raises(ValueError, match="save_every is a number of steps, or a time as in 30s, 10min or 2h; got"):
        RunOptions(save=Path("runs"), save_every=interval)
