"""Memory that runs out in one worker: it may have no more than it has."""

from __future__ import annotations

import random
import resource
from pathlib import Path

from tests.faults.expected import Expected
from tests.faults.fault import Fault, Missed, starting
from tests.faults.moments import draw_moment
from tests.faults.runs import Run, Setting


def draw_memory(random: random.Random, setting: Setting) -> Fault:
    worker = random.randrange(setting.workers)
    moment = draw_moment(random, phases=("step", "save", "evaluation"))
    more = random.choice((0, 1 << 20, 8 << 20))

    def strike(run: Run) -> None:
        pid = run.worker(worker)
        if pid is None:
            raise Missed
        limit = _address_space(pid) + more
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))

    return Fault(
        words=f"worker {worker} gets no memory beyond {more >> 20} MiB more, {moment}",
        strike=strike,
        moment=moment,
        # It may need no more; if it does, somebody must say that it was memory.
        expected=Expected("may", frozenset({1}), cause=rf"worker {worker}\b.*memory"),
        start=starting(),
    )


def _address_space(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    except OSError:
        raise Missed from None
    return pages * resource.getpagesize()
