"""Validation loss against step of several runs, from what ``thinpipe train --json`` wrote.

    python benchmarks/draw_validation.py CURVES RECORD...

Records that differ in their seed alone are one line, with the range of their seeds; the second panel looks closely at
the end. CURVES.png is drawn, CURVES.md gets a table.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from thinpipe.measure.plot import Plot

Curve = dict[int, float]  # step -> validation loss


def name_of(config: dict[str, Any]) -> str:
    if config["parallel"] == "none":
        return "one process"
    forward, backward = config["compress_forward"], config["compress_backward"]
    codec = forward if forward == backward else f"{forward} / {backward}"
    return f"{config['workers']} workers, {codec}"


def main(curves: Path, records: list[Path]) -> None:
    runs: dict[str, dict[int, Curve]] = defaultdict(dict)
    for path in records:
        record = json.loads(path.read_text())
        (row,) = record["rows"]
        curve = {epoch["step"]: epoch["validation_loss"] for epoch in row["epochs"]}
        runs[name_of(record["config"])][record["config"]["seed"]] = curve
    series = {
        name: [
            (step, fmean(values), min(values), max(values))
            for step in next(iter(seeds.values()))
            for values in [[curve[step] for curve in seeds.values()]]
        ]
        for name, seeds in runs.items()
    }
    ends = [points[-1] for points in series.values()]
    low, high = min(end[2] for end in ends), max(end[3] for end in ends)
    margin = max(high - low, 0.01)
    plot = Plot(
        title="loss on held-out text",
        x_label="step",
        y_label="nats per token",
        panels={"all of it": series, "the end": series},
        y_log=False,
        y_ranges={"the end": (low - margin, high + 3 * margin)},
    )
    plot.draw(curves.with_suffix(".png"))
    lines = ["| run | seeds | loss, nats | of each seed |", "|---|--:|--:|---|"]
    for name, seeds in runs.items():
        last = [curve[max(curve)] for _, curve in sorted(seeds.items())]
        spread = stdev(last) if len(last) > 1 else 0.0
        lines.append(
            f"| {name} | {len(last)} | {fmean(last):.4f} ± {spread:.4f} | {', '.join(f'{each:.4f}' for each in last)} |"
        )
    curves.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
