"""A toy run as the command line carries it out, in which a worker is killed; run by test_killed.py, or as a user does.

python scenario.py '{"save": ..., "compress_forward": ..., "kill_unit": ..., "kill_call": ..., ...}'  # slow, damage
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from tests.training.toy import Ears, ToyTask, settings_for
from thinpipe.commands.train.run import carry_out
from thinpipe.training.checkpoints.folder import newest
from thinpipe.training.running import Running


class Speaker(Ears):
    """Says what a user would be told."""

    def noticed(self, line: str) -> None:
        print(line, flush=True)


def spring(facts: dict[str, Any], model: nn.Sequential) -> None:
    """Kill the worker that has a unit when that is called for the so-many-th time in training; once only.

    With ``damage`` it cuts the newest checkpoint before that.
    """
    marker, calls = Path(facts["save"] + ".killed"), 0

    def count(module: nn.Module, inputs: Any) -> None:
        nonlocal calls
        if not module.training:
            return
        calls += 1
        time.sleep(facts.get("slow", 0))
        if calls == facts["kill_call"] and not marker.exists():
            marker.touch()
            if facts.get("damage"):
                os.truncate(newest(Path(facts["save"])) / "part-0.safetensors", 100)
            os.kill(os.getpid(), signal.SIGKILL)

    model[facts["kill_unit"]].register_forward_pre_hook(count)


def find_task(facts: dict[str, Any], name: str) -> ToyTask:
    return ToyTask("dropout", trap=partial(spring, facts))


def run(facts: dict[str, Any]) -> int:
    settings = settings_for(
        ToyTask(), None, workers=2, compress_forward=facts["compress_forward"], epochs=facts.get("epochs", 2)
    )
    running = Running(save=Path(facts["save"]), save_every=1, max_restarts=facts.get("max_restarts", 0))
    return carry_out(settings, running, Speaker, find_task=partial(find_task, facts))


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
