"""Adaptive bits over a link that changes while a run trains: samples/s of each phase, and the final loss.

    sudo python benchmarks/auto/measure.py --json record.json     # three seeds; about an hour on two cores
    sudo python benchmarks/auto/measure.py --steps 60 --seeds 1 --compress 2bit,auto:2-8

Runs the text task `grammar` with two workers on one thread each, in network namespaces. Its link has 100 Mbit/s, then
10, then 100, for equally many steps. So runs with different codecs process the same samples, and losses compare.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from thinpipe.cli.training import run_with_restarts
from thinpipe.lab.netem.network import change_rate
from thinpipe.lab.records.record import Check, Record, column, columns_of, row_of
from thinpipe.lab.records.report import Table, check_table, show
from thinpipe.train.events import ChosenBits, Finished, Listener, Step
from thinpipe.train.resolve import resolve_run

RATES = (100, 10, 100)  # Mbit/s
EPOCH_STEPS = 62  # of the task
COMPRESS = ("8bit", "4bit", "3bit", "2bit", "auto:2-8")


class Phases(Listener):
    """Changes the rate of the link between phases, and writes the speed of each to a file."""

    def __init__(self, owner: int, steps: int, path: Path) -> None:
        self.owner, self.steps, self.path = owner, steps, path
        self.seconds = [0.0] * len(RATES)
        self.samples = 0
        self.bits: list[tuple[int, dict[str, int]]] = []

    def stepped(self, step: Step) -> None:
        self.seconds[(step.step - 1) // self.steps] += step.seconds
        self.samples = step.samples
        if step.step % self.steps == 0 and step.step < len(RATES) * self.steps:
            change_rate(self.owner, RATES[step.step // self.steps])

    def bits_chosen(self, chosen: ChosenBits) -> None:
        self.bits.append((chosen.step, dict(chosen.bits)))

    def finished(self, end: Finished) -> None:
        speeds = [self.samples * self.steps / seconds for seconds in self.seconds]
        self.path.write_text(json.dumps({"samples_per_s": speeds, "loss": end.validation_loss, "bits": self.bits}))


def measure(compress: str, steps: int, seed: int) -> dict[str, Any]:
    """Return the speeds of the phases, the validation loss and the bits chosen in a run."""
    total = steps * len(RATES)
    given = {"task": "grammar", "compress": compress, "seed": seed, "threads": 1, "epochs": -(-total // EPOCH_STEPS)}
    given |= {"link": f"{RATES[0]}mbit", "steps": total}
    settings, running = resolve_run(given)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        code = run_with_restarts(settings, running, partial(Phases, os.getpid(), steps, path))
        if code:
            raise SystemExit(code)
        return dict(json.loads(path.read_text()))


@dataclass(frozen=True, kw_only=True)
class AutoColumns:
    """One run."""

    codec: str = column("codec", key=True)
    seed: int = column("seed", key=True, format="d")
    first_samples_per_s: float = column("100 Mbit/s:\nsamples/s", format=".0f", better="higher")
    slow_samples_per_s: float = column("10 Mbit/s:\nsamples/s", format=".0f", better="higher")
    last_samples_per_s: float = column("100 Mbit/s:\nsamples/s", format=".0f", better="higher")
    validation_loss: float = column("loss", format=".4f", better="lower")
    bits: Sequence[tuple[int, Mapping[str, int]]]  # by the first step with them


PHASES = ("first_samples_per_s", "slow_samples_per_s", "last_samples_per_s")


def checks_of(rows: Sequence[AutoColumns]) -> tuple[Check, ...]:
    """Return the claims about the runs with adaptive bits against those with fixed ones."""
    runs: dict[str, list[AutoColumns]] = {}
    for row in rows:
        runs.setdefault(row.codec, []).append(row)
    adaptive = [codec for codec in runs if codec.startswith("auto")]
    fixed = [codec for codec in runs if codec not in adaptive]
    found = []
    for codec in adaptive if fixed else ():
        for phase in PHASES:
            speeds = {name: mean(getattr(run, phase) for run in runs[name]) for name in runs}
            best = max(speeds[name] for name in fixed)
            ratio = speeds[codec] / best
            found.append(Check(claim=f"{codec}: {phase} / best fixed", measured=ratio, limit=0.9, bound="at least"))
        losses = {name: [run.validation_loss for run in runs[name]] for name in runs}
        noise = stdev(losses[fixed[0]]) if len(losses[fixed[0]]) > 1 else 0.0
        added = mean(losses[codec]) - mean(losses[fixed[0]])
        found.append(Check(claim=f"{codec}: loss added to {fixed[0]}, limit: its spread", measured=added, limit=noise))
    return tuple(found)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=250, help="steps of each phase")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--compress", default=",".join(COMPRESS))
    parser.add_argument("--json", type=Path, help="file for the record")
    chosen = parser.parse_args()
    rows: list[AutoColumns] = []
    for seed in range(chosen.seeds):
        for compress in chosen.compress.split(","):
            run = measure(compress, chosen.steps, seed)
            speeds = dict(zip(PHASES, run["samples_per_s"], strict=True))
            rows.append(AutoColumns(codec=compress, seed=seed, validation_loss=run["loss"], bits=run["bits"], **speeds))
            print(rows[-1], flush=True)
    columns, made = columns_of(AutoColumns), tuple(map(row_of, rows))
    record = Record(
        kind="auto", config={"command": sys.argv, **vars(chosen) | {"json": None}}, columns=columns, rows=made,
        checks=checks_of(rows),
    )  # fmt: skip
    if chosen.json is not None:
        record.write(chosen.json)
    show([Table(title="Runs", columns=columns, rows=made), check_table(record.checks)])


if __name__ == "__main__":
    main()
