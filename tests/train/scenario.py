"""A toy run as the command line carries it out, in which a worker is killed; run by test_killed.py, or as a user does.

python scenario.py '{"save": ..., "compress_forward": ..., ...}'  # for the rest see ``spring`` and ``run``
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

from tests.train.toy import Recorder, ToyTask, settings_for
from thinpipe.cli.training import run_with_restarts
from thinpipe.comm import signals
from thinpipe.train.checkpoints.folder import newest
from thinpipe.train.running import RunOptions


class Speaker(Recorder):
    """Says what a user would be told."""

    def noticed(self, line: str) -> None:
        print(line, flush=True)


def spring(facts: dict[str, Any], model: nn.Sequential) -> None:
    """Kill the worker that has ``kill_unit`` at the ``kill_call``-th call of that unit in training; once only.

    With ``damage`` it truncates the newest checkpoint before that. ``slow`` are seconds that each call takes, ``grace``
    replaces GRACE_S, ``marker`` is a file that the first call writes the launcher's process number into.
    """
    killed, calls = Path(f"{facts['save']}.killed"), 0
    signals.GRACE_S = facts.get("grace", signals.GRACE_S)

    def count(module: nn.Module, inputs: Any) -> None:
        nonlocal calls
        if not module.training:
            return
        calls += 1
        if calls == 1 and "marker" in facts:
            Path(facts["marker"]).write_text(str(facts["launcher"]))
        time.sleep(facts.get("slow", 0))
        if calls == facts.get("kill_call") and not killed.exists():
            killed.touch()
            if facts.get("damage"):
                os.truncate(newest(Path(facts["save"])) / "part-0.safetensors", 100)
            os.kill(os.getpid(), signal.SIGKILL)

    model[facts.get("kill_unit", 2)].register_forward_pre_hook(count)


def find_task(facts: dict[str, Any], name: str) -> ToyTask:
    return ToyTask("dropout", trap=partial(spring, facts))


def run(facts: dict[str, Any]) -> int:
    facts = facts | {"launcher": os.getpid()}
    settings = settings_for(
        ToyTask(), None, workers=2, compress_forward=facts["compress_forward"], epochs=facts.get("epochs", 2)
    )
    running = RunOptions(
        save=facts["save"] and Path(facts["save"]),
        save_every=facts.get("save_every", 1) if facts["save"] else None,
        max_restarts=facts.get("max_restarts", 0),
    )
    return run_with_restarts(settings, running, Speaker, find_task=partial(find_task, facts))


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
