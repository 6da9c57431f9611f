"""Plans in files: the options of a run, and the comparison of its speed with the prediction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinpipe.lab.records.record import Record
from thinpipe.options import options_of
from thinpipe.train.events import Finished, Listener
from thinpipe.train.settings import Settings

KIND = "plan"


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """The plan of a record."""

    options: dict[str, Any]  # of `thinpipe train`, by name and as typed
    samples_per_s: float
    low: float | None  # of the interval
    high: float | None


def read_plan(path: Path) -> PlanFile:
    """Return the plan of a record that `thinpipe plan --json` has written; raise ValueError if it is none."""
    record = Record.read(path)
    if record.kind != KIND or not record.rows or not isinstance(record.rows[0].get("options"), dict):
        raise ValueError(f"{path} is a record of {record.kind}, not of plan: give one of thinpipe plan")
    row, batch = record.rows[0], record.config["batch_size"]
    low, high = (row[name] and batch / row[name] * 1e3 for name in ("high_ms", "low_ms"))
    options = {**record.config.get("options", {}), **row["options"]}
    paths = [name for name, each in options_of(Settings).items() if each.kind is Path and name in options]
    options |= {name: Path(options[name]) for name in paths}
    return PlanFile(options=options, samples_per_s=row["samples_per_s"], low=low, high=high)


@dataclass
class Comparison(Listener):
    """A listener that prints measured and predicted speed at the end of a run."""

    plan: PlanFile

    def finished(self, end: Finished) -> None:
        off = f"{end.samples_per_s / self.plan.samples_per_s - 1:+.0%}".replace("%", " %")
        print(f"plan: {self.plan.samples_per_s:,.1f} samples/s; measured: {end.samples_per_s:,.1f}, {off}")
