"""Adaptive bits over a link that changes while a run trains: samples/s of each phase, and the final loss.

    sudo python benchmarks/auto/measure.py                     # three seeds; about an hour on two cores
    sudo python benchmarks/auto/measure.py --steps 60 --seeds 1 --compress 2bit,auto:2-8

Runs the text task `grammar` with two workers on one thread each, in network namespaces. Its link has 100 Mbit/s, then
10, then 100, for equally many steps. So runs with different codecs process the same samples, and losses compare.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from thinpipe.cli.training import run_with_restarts
from thinpipe.lab.netem.network import change_rate
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


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=250, help="steps of each phase")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--compress", default=",".join(COMPRESS))
    chosen = parser.parse_args()
    print("| codec | " + " | ".join(f"{rate} Mbit/s: samples/s" for rate in RATES) + " | validation loss |")
    print("|---|" + "--:|" * (len(RATES) + 1))
    for compress in chosen.compress.split(","):
        began = time.perf_counter()
        found = [measure(compress, chosen.steps, seed) for seed in range(chosen.seeds)]
        speeds = [mean(each) for each in zip(*(run["samples_per_s"] for run in found), strict=True)]
        losses = [run["loss"] for run in found]
        spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
        cells = " | ".join(f"{speed:.0f}" for speed in speeds)
        print(f"| `{compress}` | {cells} | {mean(losses):.4f}{spread} |", flush=True)
        for run in found:
            chosen_bits = "; ".join(f"{step} {list(bits.values())}" for step, bits in run["bits"])
            print("bits by step:" if chosen_bits else "", chosen_bits, file=sys.stderr)
        print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
