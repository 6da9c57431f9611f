"""The comparison of predicted with measured steps: a table, checks, and a scatter plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from thinpipe.codecs.recipes import directions
from thinpipe.lab.plan.network import LinkTimes, measured_cluster
from thinpipe.lab.plan.predictor import Candidate, Predictor
from thinpipe.lab.plan.profile import ModelProfile
from thinpipe.lab.records.record import Check, Record, column, columns_of, row_of
from thinpipe.lab.records.report import Table, check_table, markdown, show
from thinpipe.train.shaping import parse_link

KIND = "plan study"
BATCH = 48


@dataclass(frozen=True, kw_only=True)
class StudyColumns:
    """A row that was measured and predicted."""

    model: str = column("model", key=True)
    link: str = column("link", key=True)
    workers: int = column("workers", key=True, format="d")
    parallel: str = column("parallel", key=True)
    layout: str | None = column("layout", key=True)
    schedule: str | None = column("schedule", key=True)
    chunks: int | None = column("chunks", key=True, format="d")
    codec: str | None = column("codec", key=True)
    measured_ms: float = column("measured\nms", format=".1f")
    spread: float = column("quartiles\n±", format=".1%")
    predicted_ms: float = column("predicted\nms", format=".1f")
    off: float = column("off", format="+.1%")
    inside: bool = column("inside the\ninterval")
    peak_mib: float | None = column("measured\nMiB", format=".1f")
    predicted_mib: float | None = column("predicted\nMiB", format=".1f")
    memory_off: float | None = column("off", format="+.1%")
    bottleneck: str = column("bottleneck")


def load(out: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(out.glob("*.json")):
        entry = json.loads(path.read_text())
        yield from entry if isinstance(entry, list) else [entry]


def candidate_of(row: Mapping[str, Any]) -> Candidate:
    """Return the candidate of a row as the benchmark ran it."""
    machines = tuple(range(row["workers"]))
    if row["parallel"] != "pipeline":
        return Candidate(parallel=row["parallel"], machines=machines)
    forward, backward = directions(row["codec"])
    schedule = row["schedule"] if row["schedule"] == "gpipe" else f"1f1b:{row['in_flight']}"
    return Candidate(
        parallel="pipeline",
        machines=machines,
        layout=row["layout"],
        cuts=tuple(row["cuts"]),
        schedule=schedule,
        chunks=row["chunks"],
        forward=forward,
        backward=backward,
    )


class Study:
    """All results of a folder."""

    def __init__(self, out: Path) -> None:
        found = list(load(out))
        self.profiles = {e["name"]: ModelProfile.from_json(e["result"]) for e in found if e["kind"] == "model"}
        self.links = {
            name: LinkTimes(**times) for e in found if e["kind"] == "link" for name, times in e["result"].items()
        }
        self.cells = [e for e in found if e["kind"] == "cell"]
        self.again = {e["name"]: e for e in found if e["kind"] == "again"}

    def rows(self, half: float) -> Iterator[StudyColumns]:
        """Yield all rows with their predictions; ``half`` is half of the relative interval."""
        for cell in self.cells:
            model, network = cell["name"].split("@")
            if model not in self.profiles or network not in self.links:
                continue
            for row in cell["result"]:
                yield self.predicted(model, network, row, half)

    def predicted(self, model: str, network: str, row: Mapping[str, Any], half: float) -> StudyColumns:
        profile, workers = self.profiles[model], max(row["workers"], 2)
        cluster = measured_cluster(parse_link(network), workers, self.links[network], slowdown=profile.slowdown)
        done = Predictor(profile, cluster, BATCH).predict(candidate_of(row))
        measured, memory = row["step_ms"], max(done.memory_bytes) / 2**20
        off = done.step_ms / measured - 1
        return StudyColumns(
            model=model,
            link=row["link"],
            workers=row["workers"],
            parallel=row["parallel"],
            layout=row["layout"],
            schedule=row["schedule"] if row["in_flight"] is None else f"{row['schedule']}, {row['in_flight']}",
            chunks=row["chunks"],
            codec=row["codec"],
            measured_ms=measured,
            spread=(row["step_p75_ms"] - row["step_p25_ms"]) / 2 / measured,
            predicted_ms=done.step_ms,
            off=off,
            inside=abs(measured / done.step_ms - 1) <= half,
            peak_mib=row["peak_mib"],
            predicted_mib=memory,
            memory_off=memory / row["peak_mib"] - 1 if row["peak_mib"] else None,
            bottleneck=done.bottleneck,
        )

    def repeated(self) -> list[float]:
        """Return the relative differences of rows that were measured twice."""
        found = []
        for cell in self.cells:
            if cell["name"] in self.again:
                pairs = zip(cell["result"], self.again[cell["name"]]["result"], strict=True)
                found += [abs(one["step_ms"] / other["step_ms"] - 1) for one, other in pairs]
        return found


def regrets(rows: Sequence[StudyColumns]) -> dict[tuple[str, str], float]:
    """Return for each model and network how much slower the predicted best row is than the measured best."""
    cells: dict[tuple[str, str], list[StudyColumns]] = {}
    for row in rows:
        if row.parallel == "none":  # measured with the rows that follow
            alone = row
        else:
            cells.setdefault((row.model, row.link), [alone]).append(row)
    return {
        key: min(each, key=lambda row: row.predicted_ms).measured_ms / min(row.measured_ms for row in each) - 1
        for key, each in cells.items()
    }


def report(out: Path) -> None:
    study = Study(out)
    rows = list(study.rows(0.0))
    offs = np.array([row.off for row in rows])
    # Even rows choose the interval, odd ones test it.
    half = float(np.quantile(np.abs([row.measured_ms / row.predicted_ms - 1 for row in rows[::2]]), 0.9))
    rows = [replace(row, inside=abs(row.measured_ms / row.predicted_ms - 1) <= half) for row in rows]
    lost = regrets(rows)
    memory = [abs(row.memory_off) for row in rows if row.memory_off is not None]
    again = study.repeated()
    tested = rows[1::2]
    checks = [
        Check(claim=f"error of the step, median of {len(rows)}", measured=float(np.median(np.abs(offs))), limit=0.05),
        Check(claim="error of the step, 95th percentile", measured=float(np.quantile(np.abs(offs), 0.95)), limit=0.15),
        Check(claim="error of memory, median", measured=float(np.median(memory)) if memory else None, limit=0.10),
        Check(claim=f"inside ± {half:.1%}, {len(tested)} rows that did not choose it", limit=0.85, bound="at least",
              measured=float(np.mean([row.inside for row in tested]))),
        Check(claim="slower than the best, worst model and network", measured=max(lost.values()), limit=0.05),
        Check(claim="slower than the best, median", measured=float(np.median(list(lost.values()))), limit=0.05),
        Check(claim=f"repeated measurements differ, median of {len(again)}", limit=0.05,
              measured=float(np.median(again)) if again else None),
    ]  # fmt: skip
    record = Record(
        kind=KIND,
        config={
            "command": ["python", "benchmarks/plan/study.py", "report", str(out)],
            "calibrations": {
                "models": {n: p.to_json() for n, p in study.profiles.items()},
                "links": {n: vars(t) for n, t in study.links.items()},
            },
            "repeated": again,
            "slower_than_best": {" on ".join(key): each for key, each in lost.items()},
        },
        columns=columns_of(StudyColumns),
        rows=tuple(map(row_of, rows)),
        checks=tuple(checks),
    )
    record.write(out.with_name(f"{out.name}.record.json"))
    for name in sorted({row.model for row in rows}):
        mine = np.abs([row.off for row in rows if row.model == name])
        print(f"{name}: {len(mine)} rows, median {np.median(mine):.1%}, p95 {np.quantile(mine, 0.95):.1%}")
    worst = sorted(rows, key=lambda row: -abs(row.off))
    show([Table(title="Rows", columns=columns_of(StudyColumns), rows=list(map(row_of, worst)))])
    show([check_table(checks)])
    tables = [check_table(checks), Table(title="Rows", columns=record.columns, rows=record.rows)]
    out.with_name(f"{out.name}.md").write_text(markdown("Predicted and measured steps", record, tables))
    scatter(rows, half, out.with_name(f"{out.name}.png"))


def scatter(rows: Sequence[StudyColumns], half: float, path: Path) -> None:
    """Draw predicted against measured times."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(sorted({row.model for row in rows})):
        mine = [row for row in rows if row.model == name]
        points = [row.measured_ms for row in mine], [row.predicted_ms for row in mine]
        axes.scatter(*points, s=18, marker="os^D"[number % 4], alpha=0.75, label=name)
    ends = np.array([min(row.measured_ms for row in rows), max(row.measured_ms for row in rows)])
    axes.plot(ends, ends, color="#666666", linewidth=1)
    axes.fill_between(ends, ends / (1 + half), ends * (1 + half), color="#999999", alpha=0.25, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    axes.legend(frameon=False)
    axes.set_title(f"{len(rows)} configurations; band: ± {half:.0%}", fontsize="medium")
    figure.savefig(path, dpi=150)
