"""Validation loss against step of several runs, from what ``thinpipe train --json`` wrote.

    python benchmarks/draw_validation.py CURVES RECORD...

Records that differ in their seed alone are one line, with the range of their seeds. The runs of the first record are
what the others are held against, seed by seed: the second panel is the difference, over the spread of their seeds at
the end. CURVES.png is drawn, a table printed.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from math import exp
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from thinpipe.codecs.recipes import recipe_of
from thinpipe.lab.records.plot import Plot

Curves = dict[int, dict[int, float]]  # seed -> step -> validation loss
Points = list[tuple[float, float, float, float]]


def name_of(config: dict[str, Any]) -> str:
    if config["parallel"] == "none":
        return "one process"
    forward, backward = config["compress_forward"], config["compress_backward"]
    codec = recipe_of(forward, backward) or (forward if forward == backward else f"{forward} / {backward}")
    return f"{config['workers']} workers, {codec}"


def read(records: list[Path]) -> dict[str, Curves]:
    runs: dict[str, Curves] = defaultdict(dict)
    for path in records:
        record = json.loads(path.read_text())
        (row,) = record["rows"]
        curve = {epoch["step"]: epoch["validation_loss"] for epoch in row["epochs"]}
        runs[name_of(record["config"])][record["config"]["seed"]] = curve
    return runs


def minus(run: Curves, other: Curves) -> Curves:
    return {seed: {step: loss - other[seed][step] for step, loss in curve.items()} for seed, curve in run.items()}


def points(run: Curves) -> Points:
    steps = next(iter(run.values()))
    losses = {step: [curve[step] for curve in run.values()] for step in steps}
    return [(step, fmean(each), min(each), max(each)) for step, each in losses.items()]


def ends(run: Curves) -> list[float]:
    return [curve[max(curve)] for _, curve in sorted(run.items())]


def mean_and_spread(values: list[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def main(picture: Path, records: list[Path]) -> None:
    runs = read(records)
    first, reference = next(iter(runs.items()))
    spread = stdev(ends(reference))
    close = f"minus {first} of the same seed"
    Plot(
        title="loss on held-out text",
        x_label="step",
        y_label="nats per token",
        panels={
            f"mean and range of {len(reference)} seeds": {name: points(run) for name, run in runs.items()},
            close: {name: points(minus(run, reference)) for name, run in runs.items()},
        },
        y_log=False,
        y_ranges={close: (-1.5 * spread, 1.5 * spread)},
        bands={close: (0.0, spread)},
        band_label=f"band: {first}, spread of seeds",
    ).draw(picture.with_suffix(".png"))
    print(f"| run | perplexity | of each seed | loss, nats | minus {first}, seed by seed |\n|---|--:|--:|--:|--:|")
    for name, run in runs.items():
        perplexities = [exp(loss) for loss in ends(run)]
        each = ", ".join(f"{perplexity:.2f}" for perplexity in perplexities)
        difference = "" if run is reference else mean_and_spread(ends(minus(run, reference)), 4)
        losses = mean_and_spread(ends(run), 4)
        print(f"| {name} | {mean_and_spread(perplexities, 2)} | {each} | {losses} | {difference} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
