"""Predictions of `thinpipe plan` against measured steps: calibrations, measurements, and the comparison.

    python benchmarks/plan/study.py measure OUT --seconds 400     # in several processes at once, for more cores
    python benchmarks/plan/study.py report OUT

``measure`` takes tasks from a list that all processes share through the folder OUT, so that it can be interrupted and
go on: a calibration of every model and every link, then cells of rows: one model on one network. A network is
calibrated with two workers and messages only, a model in one process. ``report`` predicts every row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

from thinpipe.codecs.recipes import RECIPES, directions
from thinpipe.lab.bench.meter import peak_extra_bytes
from thinpipe.lab.bench.models import Shapes, build_cuttable, build_named
from thinpipe.lab.bench.pipeline.measuring import measure as measure_rows
from thinpipe.lab.bench.pipeline.pipeline_options import PipelineBenchOptions, Variant
from thinpipe.lab.plan.calibration import calibrate
from thinpipe.lab.plan.crowding import crowd, crowded_ms
from thinpipe.lab.plan.model import PlannedModel
from thinpipe.lab.plan.network import measure_links
from thinpipe.lab.plan.profile import ModelProfile, profile_units
from thinpipe.launch.workers import run_workers
from thinpipe.train.engines.world import World, join_world
from thinpipe.train.shaping import parse_link

BATCH = 48
CHUNKS = (2, 4, 8, 16, 24)
SEED = 0
NETWORKS = (
    "10mbit,5ms",
    "50mbit/10mbit,20ms",
    "100mbit,1ms",
    "100mbit/20mbit,50ms",
    "200mbit/50mbit,10ms",
    "300mbit,30ms",
    "500mbit/100mbit,2ms",
    "1gbit,1ms",
)
_LLAMA = (
    "hidden_size=192,intermediate_size=512,num_hidden_layers=6,num_attention_heads=4,num_key_value_heads=4,"
    "vocab_size=1024"
)
MODELS: dict[str, dict[str, Any]] = {
    "roberta": {"model": "roberta", "shapes": Shapes(batch_size=BATCH, hidden=128, layers=4, tokens=64)},
    "lm": {"config": "llama", "config_set": _LLAMA, "shapes": Shapes(batch_size=BATCH, tokens=64)},
    "lora": {"model": "plan_study_models:lora", "shapes": Shapes(batch_size=BATCH, tokens=64)},
    "digits": {"model": "mobilenetv2", "shapes": Shapes(batch_size=BATCH, image_size=32, width=0.5)},
}
CODECS = ("none", *RECIPES)
ROWS_PER_CELL = 5
STEPS, WARM_UP = 7, 3


@dataclass(frozen=True, kw_only=True)
class Cell(PipelineBenchOptions):
    """Options of the pipeline benchmark for rows that are no product of lists."""

    chosen: tuple[Variant, ...] = ()

    def variants(self) -> list[Variant]:
        return list(self.chosen)


def chosen_rows(model: str, network: str) -> tuple[Variant, ...]:
    """Return random rows of a cell, the same in every process."""
    rng, link = random.Random(f"{SEED} {model} {network}"), parse_link(network)
    least = min(link.every.down_mbit_per_s or 0, link.every.up_mbit_per_s or 0) if link is not None else 0
    slow = least < 50
    # An exchange of all gradients takes seconds on a slow link, and nothing is learned from it.
    rows = [] if least < 100 else [Variant(workers=rng.choice((2, 3)), link=link, parallel="data")]
    while len(rows) < ROWS_PER_CELL:
        rows.append(
            Variant(
                workers=rng.choice((2, 3)),
                link=link,
                parallel="pipeline",
                layout=rng.choice(("linear", "client-server")),
                schedule=rng.choice(("gpipe", "1f1b")),
                chunks=rng.choice(CHUNKS),
                compress=rng.choice(CODECS[1:] if slow else CODECS),
            )
        )
    return (Variant(workers=1, parallel="none"), *dict.fromkeys(rows))


def options_of(model: str, rows: tuple[Variant, ...] = (), **more: Any) -> Cell:
    rows = rows or (Variant(workers=1, parallel="none"),)
    workers = tuple(sorted({row.workers for row in rows}))
    facts = {"device": "cpu", "threads": 1, "steps": STEPS, "warmup": WARM_UP, "workers": workers, "chunks": CHUNKS}
    return Cell(chosen=rows, **facts, **MODELS[model], **more)


# Calibrations


def calibrate_model(name: str) -> dict[str, Any]:
    """Return the measured profile of a model, from one worker, and its slowdown from several."""
    found = ModelProfile.from_json(run_workers(_calibrate, name, workers=1, backend="gloo")[0])

    def run(count: int, cuts: Sequence[int], samples: int) -> float:
        return float(run_workers(_crowded, name, cuts, samples, workers=count, backend="gloo")[0])

    return crowd(found, run, 3, BATCH, BATCH // max(CHUNKS)).to_json()


def _planned(name: str) -> tuple[PlannedModel, ModelProfile]:
    options = options_of(name)
    if options.source is None:
        model, batch = build_cuttable(options.model, options.shapes)
        planned = PlannedModel(name=name, model=model, load=None, batch=batch)
    else:
        model, batch, fill = build_named(options.source, options.shapes)
        planned = PlannedModel(name=name, model=model, load=fill, batch=batch)
    return planned, profile_units(*planned.cut(3, amp=False), name=name)


def _join() -> World:
    """Join, and allocate memory as the pipeline benchmark does once it has measured that."""
    peak_extra_bytes(lambda: None)
    return join_world("cpu", threads=1)


def _crowded(name: str, cuts: Sequence[int], samples: int) -> float:
    world, (planned, profile) = _join(), _planned(name)
    return crowded_ms(profile, planned, world, cuts, batch_size=BATCH, samples=samples)


def _calibrate(name: str) -> dict[str, Any]:
    world, (planned, profile) = _join(), _planned(name)
    sizes = [BATCH // count for count in (1, 2, 3, *CHUNKS)]
    specs = [directions(each) for each in CODECS if each != "none"]
    return calibrate(profile, planned, world, sizes=sizes, codecs=specs).to_json()


def calibrate_link(network: str) -> dict[str, Any]:
    times = measure_links([parse_link(network)])
    return {name: asdict(each) for name, each in times.items()}


def measure_cell(name: str) -> list[dict[str, Any]]:
    """Return the rows of a cell."""
    model, network = name.split("@")
    outcome = measure_rows(options_of(model, chosen_rows(model, network)), print, print)
    assert outcome is not None
    return [dict(row) for row in outcome.record.rows]


# Tasks


def tasks() -> list[tuple[str, str]]:
    """Return kinds and names of all tasks, the calibrations first."""
    cells = [f"{model}@{network}" for network in NETWORKS for model in MODELS]
    random.Random(SEED).shuffle(cells)
    found = [("model", name) for name in MODELS] + [("link", name) for name in NETWORKS]
    # Some cells again: how repeatable is a measurement?
    return found + [("cell", name) for name in cells] + [("again", name) for name in cells[:4]]


WORK = {"model": calibrate_model, "link": calibrate_link, "cell": measure_cell, "again": measure_cell}


def measure(out: Path, seconds: float, kinds: list[str]) -> None:
    """Do tasks that no other process has taken, until the time is over."""
    out.mkdir(parents=True, exist_ok=True)
    ends, longest = time.monotonic() + seconds, 10.0
    for kind, name in (task for task in tasks() if task[0] in kinds):
        path = out / f"{kind} {name.replace('/', '|')}.json"
        try:
            path.with_suffix(".taken").mkdir()
        except FileExistsError:
            continue
        if time.monotonic() + longest > ends:
            path.with_suffix(".taken").rmdir()
            continue
        began = time.monotonic()
        try:
            result = WORK[kind](name)
        except Exception as error:
            print(f"{kind} {name}: {error!r}", flush=True)
            continue
        took = time.monotonic() - began
        longest = max(longest, took)
        path.write_text(json.dumps({"kind": kind, "name": name, "seconds": took, "result": result}))
        print(f"{kind} {name}: {took:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("measure", "report"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--kinds", default=",".join(WORK), help="of tasks")
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.out, given.seconds, given.kinds.split(","))
    else:
        from report import report

        report(given.out)


if __name__ == "__main__":
    main()
