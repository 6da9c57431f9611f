"""Workers that are killed at any step: taken up again, by hand or unattended, the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.processes import local_workers
from tests.scripts import run_script
from tests.train import scenario
from tests.train.toy import train_toy
from thinpipe.train.checkpoints.best import follow_best
from thinpipe.train.checkpoints.folder import checkpoints, newest
from thinpipe.train.checkpoints.manifest import read_manifest
from thinpipe.train.running import RunOptions

SCENARIO = str(scenario.__file__)
CHUNKS, STEPS = 3, 8
CLIENT, SERVER = 0, 2  # a unit of each

pytestmark = pytest.mark.timeout(240)

# Another one every time; THINPIPE_KILL_SEED=N gives those of a run that failed.
SEED = int(os.environ.get("THINPIPE_KILL_SEED", random.SystemRandom().randrange(10**6)))


def facts_for(directory: Path, compress: str, unit: int) -> dict[str, Any]:
    """A kill at some chunk of some step, named if the test fails."""
    call = random.Random(f"{SEED} {compress} {unit}").randint(1, STEPS * CHUNKS)
    print(f"unit {unit} is killed at call {call}, THINPIPE_KILL_SEED={SEED}")
    return {"save": str(directory / "saved"), "compress_forward": compress, "kill_unit": unit, "kill_call": call}


def run_here(facts: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and words of a run whose workers are forked from what has imported everything; none may be left."""
    code = scenario.run(facts)
    assert not local_workers()
    return code, capfd.readouterr().err


def unbroken_sha256(pool: Pool, compress: str) -> str:
    return pool.run(train_toy, 2, "dropout", RunOptions(), {"compress_forward": compress})[0].end.parameters_sha256


@pytest.mark.parametrize(("compress", "unit"), [("sort:8", SERVER), ("power:4", CLIENT), ("axes:2+now", SERVER)])
def test_killed_and_resumed_ends_as_unbroken(
    pool: Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str], compress: str, unit: int
) -> None:
    facts = facts_for(tmp_path, compress, unit)
    code, output = run_here(facts, capfd)
    saved = Path(facts["save"])
    assert code == 1, output
    assert f"worker {int(unit == SERVER)}: killed by signal 9" in output, output
    done = checkpoints(saved)
    assert len(done[-2:]) == min((facts["kill_call"] - 1) // CHUNKS, 2), output
    assert set(done[:-2]) <= {follow_best(saved / "best")}
    if done:
        assert f"the last checkpoint is {done[-1]}; go on with: thinpipe train --resume {saved}" in output
    rest = RunOptions(resume=newest(saved) if done else None)
    resumed = pool.run(train_toy, 2, "dropout", rest, {"compress_forward": compress})[0]
    assert resumed.end.parameters_sha256 == unbroken_sha256(pool, compress)


@pytest.mark.parametrize(("compress", "unit"), [("power:4", SERVER), ("axes:2+now", CLIENT)])
def test_killed_with_a_restart_left_ends_as_unbroken(
    pool: Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str], compress: str, unit: int
) -> None:
    facts = facts_for(tmp_path, compress, unit) | {"max_restarts": 1}
    code, output = run_here(facts, capfd)
    assert code == 0, output
    assert "thinpipe: starting again from " in output, output
    progress = read_manifest(newest(Path(facts["save"]))).progress
    assert progress.is_complete
    assert progress.parameters_sha256 == unbroken_sha256(pool, compress)


def test_a_restart_with_a_damaged_checkpoint_loads_the_one_before(pool: Pool, tmp_path: Path) -> None:
    """Killed in step 6, the parts of step 5 cut: one restart is enough, from step 4."""
    saved = tmp_path / "saved"
    facts = {"save": str(saved), "compress_forward": "sort:8", "kill_unit": SERVER, "kill_call": 5 * CHUNKS + 2}
    code, output = run_script(SCENARIO, json.dumps(facts | {"max_restarts": 1, "damage": True}), limit_s=170)
    assert code == 0, output
    assert output.count("thinpipe: starting again from ") == 1, output
    assert "step 5 is damaged: part-0.safetensors has 100 bytes, and " in output
    assert "; going on from step 4" in output
    assert read_manifest(newest(saved)).progress.parameters_sha256 == unbroken_sha256(pool, "sort:8")
