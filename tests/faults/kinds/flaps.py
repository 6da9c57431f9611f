"""Links that flap: the link of one worker goes down for seconds, again and again, and the run goes on."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.expected import Expected, Result
from tests.faults.fault import Fault, Impossible, Missed, starting
from tests.faults.kinds.cuts import set_link
from tests.faults.moments import Moment
from tests.faults.runs import Run, Setting
from thinpipe.lab.netem.network import missing_for_networks

_LINK, _EPOCH_S = "1mbit", 8.0  # an epoch of `8bit` takes 8.8 s over such a link, and hardly any computing
_PATIENCE_S = 20
_UP_S, _DOWN_S = (2.0, 12.0), (1.0, 3.0)
_SOAK_UP_S, _SOAK_DOWN_S = 28.0, 2.0
# Between the second quarter of a soak and its end. The allocators of Python and of C++ grow in steps of some MiB.
_MOST_GROWTH = {"MiB": 16, "descriptors": 2, "threads": 2}


@dataclass(frozen=True)
class Lengths:
    """How long the kinds take that can be long."""

    flaps: int = 3
    soak_s: float = 60.0


def draw_flap(random: random.Random, setting: Setting, lengths: Lengths) -> Fault:
    """Cuts and pauses of random lengths."""
    pauses = [(random.uniform(*_UP_S), random.uniform(*_DOWN_S)) for _ in range(lengths.flaps)]

    def also(run: Run, result: Result) -> None:
        warnings = run.machines[0].stderr().count("thinpipe: waiting for worker")
        result.measured.append(f"{len(pauses)} flaps in {sum(map(sum, pauses)):.0f} s, {warnings} silences reported")

    return _flapping(random, setting, pauses, lambda run: None, also)


def draw_soak(random: random.Random, setting: Setting, lengths: Lengths) -> Fault:
    """A run of minutes, with a flap every 30 s, whose processes must not grow."""
    pauses = [(_SOAK_UP_S, _SOAK_DOWN_S)] * max(2, round(lengths.soak_s / (_SOAK_UP_S + _SOAK_DOWN_S)))
    samples: list[dict[str, dict[str, int]]] = []

    def also(run: Run, result: Result) -> None:
        _check_growth(samples, result)

    return _flapping(random, setting, pauses, lambda run: samples.append(_sample(run)), also)


def _flapping(
    random: random.Random,
    setting: Setting,
    pauses: Sequence[tuple[float, float]],
    before_each: Callable[[Run], None],
    also: Callable[[Run, Result], None],
) -> Fault:
    lacks = missing_for_networks()
    if lacks is not None:
        raise Impossible(f"links in network namespaces need {lacks}")
    worker, downs = random.randrange(setting.workers), [down_s for _, down_s in pauses]
    epochs = 3 + round(sum(up_s for up_s, _ in pauses) / _EPOCH_S)

    def strike(run: Run) -> None:
        for up_s, down_s in pauses:
            time.sleep(up_s)
            if run.is_over:
                raise Missed
            before_each(run)
            set_link(run, worker, "down")
            time.sleep(down_s)
            set_link(run, worker, "up")

    return Fault(
        words=f"link of worker {worker} down {len(pauses)} times for {min(downs):.1f} to {max(downs):.1f} s",
        strike=strike,
        moment=Moment("step", 1, 0.0),
        expected=Expected("must"),
        start=starting("--link", _LINK, "--patience", str(_PATIENCE_S)),
        setting=replace(setting, codec="8bit", epochs=epochs),
        recover_options=("--link", "100mbit"),  # not as slow, and it clears away what a killed run left
        also=also,
    )


def _sample(run: Run) -> dict[str, dict[str, int]]:
    """Memory, descriptors and threads of every process that computes, and of the launcher."""
    workers = [each.pid for each in run.machines[0].workers()]
    named = {"launcher": run.machines[0].pid} | {f"worker {n}": pid for n, pid in enumerate(workers)}
    return {name: _use_of(pid) for name, pid in named.items()}


def _use_of(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        facts = dict(line.split(":", 1) for line in lines)
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        raise Missed from None
    return {
        "MiB": int(facts["VmRSS"].split()[0]) >> 10,
        "descriptors": descriptors,
        "threads": int(facts["Threads"]),
    }


def _check_growth(samples: Sequence[dict[str, dict[str, int]]], result: Result) -> None:
    """Blame whatever grew after the first quarter, in which a run allocates what it keeps."""
    resolved = samples[len(samples) // 4 :]
    for name in resolved[0]:
        for what, most in _MOST_GROWTH.items():
            values = [sample[name][what] for sample in resolved]
            grew = max(values[len(values) // 2 :]) - max(values[: len(values) // 2 + 1])
            result.measured.append(f"{name}: {what} {' '.join(str(sample[name][what]) for sample in samples)}")
            if grew > most:
                result.blame("other", f"{name} grew by {grew} {what}: {values}")
