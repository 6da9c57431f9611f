"""Loss curves of several runs in one picture, from what ``thinpipe train --log MODEL/CODEC`` wrote.

    python benchmarks/draw_curves.py FOLDER CURVES

FOLDER holds MODEL/CODEC folders; CURVES.png and CURVES.json are written. A point is the mean loss of 25 steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from thinpipe.lab.records.plot import Plot

STEPS = 25  # to a point
ORDER = ("none", "8bit", "4bit", "2bit")


def losses(folder: Path) -> list[float]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [event.value for event in events.Scalars("train/loss")]


def points(values: list[float]) -> list[tuple[float, float]]:
    starts = range(0, len(values), STEPS)
    return [(start + STEPS / 2, fmean(values[start : start + STEPS])) for start in starts]


def main(folder: Path, name: Path) -> None:
    curves = {
        model.name: {codec: losses(model / codec) for codec in ORDER if (model / codec).is_dir()}
        for model in sorted(folder.iterdir())
        if model.is_dir()
    }
    plot = Plot(
        title="loss while training, mean of 25 steps",
        x_label="step",
        y_label="training loss",
        panels={model: {codec: points(values) for codec, values in runs.items()} for model, runs in curves.items()},
    )
    plot.draw(name.with_suffix(".png"))
    name.with_suffix(".json").write_text(json.dumps(curves) + "\n")
    for model, runs in curves.items():
        for codec, values in runs.items():
            print(f"{model} {codec}: {len(values)} steps, mean loss of the last 100 {fmean(values[-100:]):.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
