"""A toy run as the command line carries it out, in which a worker is killed; run by test_killed.py as a user runs it.

python scenario.py '{"save": ..., "compress_forward": ..., "kill_unit": ..., "kill_call": ..., "slow": ...}'
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
from thinpipe.commands.train_run import carry_out
from thinpipe.training.settings import Running


def spring(marker: str, unit: int, call: int, slow_s: float, model: nn.Sequential) -> None:
    """Kill the worker that has a unit when that is called for the so-many-th time in training; once only."""
    calls = 0

    def count(module: nn.Module, inputs: Any) -> None:
        nonlocal calls
        if not module.training:
            return
        calls += 1
        time.sleep(slow_s)
        if calls == call and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model[unit].register_forward_pre_hook(count)


def find_task(facts: dict[str, Any], name: str) -> ToyTask:
    marker = facts["save"] + ".killed"
    return ToyTask(
        "dropout", trap=partial(spring, marker, facts["kill_unit"], facts["kill_call"], facts.get("slow", 0))
    )


if __name__ == "__main__":
    facts = json.loads(sys.argv[1])
    settings = settings_for(
        ToyTask(), None, workers=2, compress_forward=facts["compress_forward"], epochs=facts.get("epochs", 2)
    )
    running = Running(save=Path(facts["save"]), save_every=1)
    restarts = facts.get("max_restarts", 0)
    sys.exit(carry_out(settings, running, Ears, max_restarts=restarts, find_task=partial(find_task, facts)))
