"""Two faults at a time: while a worker is stopped or cut off, another is killed or stopped."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

from tests.faults.expected import END_S, Expected
from tests.faults.fault import Fault, Impossible, Missed, starting
from tests.faults.kinds.cuts import set_link
from tests.faults.moments import draw_moment
from tests.faults.runs import PATIENCE_S, Run, Setting
from thinpipe.lab.netem.network import missing_for_networks

_LINK = ("--link", "100mbit")


def draw_pair(random: random.Random, setting: Setting) -> Fault:
    cuts, kills = random.random() < 0.5, random.random() < 0.5
    if cuts and (lacks := missing_for_networks()) is not None:
        raise Impossible(f"links in network namespaces need {lacks}")
    first = random.randrange(setting.workers)
    second = random.choice([worker for worker in range(setting.workers) if kills or worker != first])
    moment = draw_moment(random, phases=("step", "save", "evaluation"))
    # Together less than the patience, with what TCP needs after a cut.
    before_s, between_s, after_s = (random.uniform(0, 0.2 * PATIENCE_S) for _ in range(3))

    def disturb(run: Run, *, begins: bool) -> None:
        if cuts:
            set_link(run, first, "down" if begins else "up")
        else:
            _send(run, first, signal.SIGSTOP if begins else signal.SIGCONT)

    def strike(run: Run) -> None:
        disturb(run, begins=True)
        time.sleep(before_s)
        _send(run, second, signal.SIGKILL if kills else signal.SIGSTOP)
        time.sleep(between_s)
        with suppress(Missed):  # the second fault may have ended all
            if not kills:
                _send(run, second, signal.SIGCONT)
                time.sleep(after_s)
            disturb(run, begins=False)

    ends = Expected("must not", frozenset({1}), cause=rf"worker {second}\b.*SIGKILL", within_s=PATIENCE_S + END_S)
    return Fault(
        words=f"worker {first} {'cut off' if cuts else 'stopped'} for seconds, and meanwhile worker {second} "
        f"{'killed' if kills else 'stopped for a while'}, {moment}",
        strike=strike,
        moment=moment,
        expected=ends if kills else Expected("must"),
        start=starting(*(_LINK if cuts else ())),
        recover_options=_LINK if cuts else (),
    )


def _send(run: Run, worker: int, number: signal.Signals) -> None:
    pid = run.worker(worker)
    if pid is None or run.is_over:
        raise Missed
    with suppress(ProcessLookupError):
        os.kill(pid, number)
