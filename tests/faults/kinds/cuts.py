"""Cables pulled out: the link of a worker in a thin network goes down, for a while or for good."""

from __future__ import annotations

import random
import subprocess
import time

from tests.faults.expected import END_S, Expected
from tests.faults.fault import Fault, Impossible, Missed, starting
from tests.faults.moments import draw_moment
from tests.faults.runs import PATIENCE_S, Run, Setting, namespaces_of
from thinpipe.lab.netem.network import INTERFACE, missing_for_networks


def draw_cut(random: random.Random, setting: Setting) -> Fault:
    lacks = missing_for_networks()
    if lacks is not None:
        raise Impossible(f"links in network namespaces need {lacks}")
    for_good = random.random() < 0.4
    worker = random.randrange(setting.workers)
    moment = draw_moment(random, phases=("step", "save", "evaluation"))
    cut_s = random.uniform(0.5, 0.5 * PATIENCE_S)  # TCP tries again in growing steps: it is back later than the cable

    def strike(run: Run) -> None:
        set_link(run, worker, "down")
        if not for_good:
            time.sleep(cut_s)
            set_link(run, worker, "up")

    ends = Expected("must not", frozenset({1}), cause=r"worker \d|stage \d", within_s=PATIENCE_S + END_S)
    return Fault(
        words=f"link of worker {worker} cut {'for good' if for_good else f'for {cut_s:.1f} s'}, {moment}",
        strike=strike,
        moment=moment,
        expected=ends if for_good else Expected("must"),
        start=starting("--link", "100mbit"),
        recover_options=("--link", "100mbit"),  # which clears away what a killed run left
    )


def set_link(run: Run, worker: int, state: str) -> None:
    places = [name for name in namespaces_of([run.machines[0].pid]) if name.endswith(f"-{worker}")]
    if not places:
        raise Missed
    for place in places:
        subprocess.run(["ip", "-n", place, "link", "set", INTERFACE, state], capture_output=True, check=False)
