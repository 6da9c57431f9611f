"""What the engine costs and gains beside torch's own stage, and what 1F1B saves in memory.

    python -m thinpipe.bench.pipeline_engine --json FILE --markdown FILE

Speed: the same torch schedule with torch's stage and with thinpipe's, uncompressed and compressed, two workers, a
step of each in turn. On loopback thinpipe must not be slower; over a thin link (needs root) it should be faster even
uncompressed, because its receives are posted ahead of need. Memory: GPipe against 1F1B at 16 chunks, every worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from thinpipe.bench.pipeline_work import TORCH, Workload, median_ms, time_steps, weigh_step
from thinpipe.measure import report
from thinpipe.measure.record import Check, Column, Record, Row
from thinpipe.workers.launch import run_workers
from thinpipe.workers.network import missing_for_networks, thin_network

SPEED = Workload()
MEMORY = Workload(width=256, rows=2048, layers=6, chunks=16)
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")
SPECS = [TORCH, "none", "sort:8"]

COLUMNS = (
    Column(name="link", heading="link", key=True),
    Column(name="schedule", heading="schedule", key=True),
    Column(name="stage", heading="stage", key=True),
    Column(name="layout", heading="layout", key=True),
    Column(name="worker", heading="worker", key=True),
    Column(name="step_ms", heading="step\nms", format=".1f", better="lower"),
    Column(name="of_torch", heading="steps per s,\ntorch's stage = 1", format=".2f", better="higher"),
    Column(name="gpipe_mib", heading="peak GPipe\nMiB", format=".1f", better="lower"),
    Column(name="one_f_one_b_mib", heading="peak 1F1B\nMiB", format=".1f", better="lower"),
)


def measure_speed(link_mbit_per_s: float | None) -> Iterator[Row]:
    """Step times per schedule and stage on loopback, or over a link of a given rate."""
    link = "loopback" if link_mbit_per_s is None else f"{link_mbit_per_s:g} Mbit/s"
    for schedule in SCHEDULES:
        times = _time_steps(schedule, link_mbit_per_s)
        torch_ms = median_ms(times[TORCH])
        for spec in SPECS:
            step_ms = median_ms(times[spec])
            stage = "torch" if spec == TORCH else f"thinpipe {spec}"
            yield {
                "link": link,
                "schedule": schedule,
                "stage": stage,
                "step_ms": step_ms,
                "of_torch": torch_ms / step_ms,
            }


def measure_memory() -> Iterator[Row]:
    """Peak memory of a step, GPipe and 1F1B, on every worker of both layouts."""
    for layout in ("linear", "client-server"):
        peaks = [run_workers(weigh_step, MEMORY, layout, order, workers=2) for order in ("gpipe", "1f1b")]
        for worker, (gpipe, one_f_one_b) in enumerate(zip(*peaks, strict=True)):
            yield {
                "layout": layout,
                "worker": str(worker),
                "gpipe_mib": None if gpipe is None else gpipe / 2**20,
                "one_f_one_b_mib": None if one_f_one_b is None else one_f_one_b / 2**20,
            }


def check(rows: list[Row]) -> tuple[Check, ...]:
    """What is promised: no slower on loopback, faster on a thin link, less memory."""

    checks = []
    timed = [row for row in rows if row.get("stage") == "thinpipe none"]
    for link in dict.fromkeys(row["link"] for row in timed):
        ratio, where = min((row["of_torch"], row["schedule"]) for row in timed if row["link"] == link)
        limit, claim = (0.95, "as fast as") if link == "loopback" else (1.1, "faster than")
        checks.append(
            Check(
                claim=f"uncompressed, {claim} torch's stage on {link}",
                measured=ratio,
                limit=limit,
                bound="at least",
                detail=where,
                required=False,
            )
        )
    weighed = [row for row in rows if row.get("gpipe_mib") and row.get("one_f_one_b_mib")]
    if weighed:
        ratio, where = max(
            (row["one_f_one_b_mib"] / row["gpipe_mib"], f"{row['layout']}, worker {row['worker']}") for row in weighed
        )
        checks.append(
            Check(
                claim=f"peak memory under 1F1B, of that under GPipe, {MEMORY.chunks} chunks",
                measured=ratio,
                limit=0.8,
                detail=where,
            )
        )
    return tuple(checks)


def _time_steps(schedule: str, link_mbit_per_s: float | None) -> dict[str, list[float]]:
    with thin_network(link_mbit_per_s, workers=2) as network:
        return run_workers(time_steps, SPEED, schedule, SPECS, workers=2, network=network)[0]


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a page here.")] = None,
    link_mbit_per_s: Annotated[float, typer.Option(help="Rate of the thin link.")] = 200.0,
) -> None:
    """Measure the pipeline engine on this machine; takes a few minutes."""
    lacks = missing_for_networks()
    links = [None] if lacks else [None, link_mbit_per_s]
    rows: list[Row] = [row for link in links for row in measure_speed(link)] + list(measure_memory())
    config: dict[str, Any] = {
        "command": ["python", "-m", __spec__.name],
        "speed": asdict(SPEED),
        "memory": asdict(MEMORY),
        "link_mbit_per_s": link_mbit_per_s,
    }
    record = Record(kind="pipeline engine", config=config, columns=COLUMNS, rows=tuple(rows), checks=check(rows))
    note = f"No thin link: here is no {lacks}." if lacks else ""
    tables = [
        report.Table(title="Speed", columns=COLUMNS, rows=[row for row in rows if "link" in row], note=note),
        report.Table(title="Memory", columns=COLUMNS, rows=[row for row in rows if "layout" in row]),
        report.check_table(record.checks),
    ]
    report.show(tables)
    if json_file:
        record.write(json_file)
    if markdown:
        markdown.write_text(report.markdown("The pipeline engine", record, tables))


if __name__ == "__main__":
    typer.run(main)
