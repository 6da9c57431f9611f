"""Tables of the pipeline benchmark, the line of a row, and a plot of speed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from thinpipe.lab.bench.pipeline.pipeline_columns import COLUMNS, PARTS
from thinpipe.lab.records.plot import Plot
from thinpipe.lab.records.record import Column, Row
from thinpipe.lab.records.report import Table
from thinpipe.train.shaping import parse_link

_ONE_RATE = re.compile(r"none|[\d.]+[kmg]bit")
_BY_NAME = {column.name: column for column in COLUMNS}
_KEYS = tuple(column for column in COLUMNS if column.key)
_SPEED = (
    "threads",
    "in_flight",
    "samples_per_s",
    "of_data_parallel",
    "of_uncompressed",
    "of_torch",
    "step_p25_ms",
    "step_ms",
    "step_p75_ms",
    "step_p95_ms",
)
_BOUND = (
    "busiest_compute_p25_ms",
    "busiest_compute_ms",
    "busiest_compute_p75_ms",
    "busiest_wire_ms",
    "delay_ms",
    "bound_ms",
    "order_ms",
    "step_ms",
    "of_bound",
    "bubble",
    "bubble_theory",
)
_COST = ("tensor_bytes", "wire_bytes", "busiest_wire_bytes")
_PER_WORKER = (
    Column(name="worker", heading="worker", key=True, format="d"),
    *(_BY_NAME[part] for part in PARTS),
    Column(name="sent_bytes", heading="sent\nbytes", format="d"),
    Column(name="received_bytes", heading="received\nbytes", format="d"),
    Column(name="parameter_mib", heading="parameters\nMiB", format=".1f"),
    Column(name="peak_mib", heading="peak\nMiB", format=".0f"),
)

SPEED_NOTE = "step: median of the timed steps; p25 and p75: its quartiles. Speed and ratios follow from the median."
BOUND_NOTE = (
    "busiest worker: its forward, backward and update in the timed steps, with quartiles. bound: the larger of it and\n"
    "the transfer of the bytes of the busiest direction of a link, with the delays before and after; at least the\n"
    "delays of one chunk, there and back. order: time of the schedule on such workers and links, without codecs and\n"
    "headers. bubble: time in which workers do not compute; in theory: with links that take no time."
)
PARTS_NOTE = (
    "compute: forward, backward, update. wait: for a sender that has nothing to send yet. transfer: for a message in\n"
    "transit, unless compute hides it. compute is a median, the others are means. peak: in addition to the memory\n"
    "of the worker before its model."
)


def row_line(row: Row) -> str:
    """Return a line with the step, its quartiles, its bound and the fraction reached."""
    quartiles = f"{row['step_p25_ms']:.1f} to {row['step_p75_ms']:.1f}"
    return (
        f"{describe(row):<58} {row['samples_per_s']:>9.1f} samples/s, step {row['step_ms']:.1f} ms ({quartiles}), "
        f"bound {row['bound_ms']:.1f} ms, reached {row['of_bound']:.0%}"
    )


def describe(row: Row) -> str:
    link = "" if row["workers"] == 1 else f" over {row['link']}"
    if row["parallel"] != "pipeline":
        return f"{ {'none': 'single process', 'data': 'data-parallel'}[row['parallel']] }, {row['workers']}{link}"
    how = f"{row['layout']} {row['schedule']}, {row['workers']}{link}"
    in_flight = "" if row["in_flight"] in (None, row["chunks"]) else f", {row['in_flight']} in flight"
    return f"{how}, {row['chunks']} chunks{in_flight}, {_sender(row)}"


def result_tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables: speed, lower bound, traffic, and the time of each worker by part."""
    detailed = [{**row, **part} for row in rows for part in row["per_worker"]]

    def table(title: str, names: Sequence[str], note: str = "") -> Table:
        return Table(title=title, columns=(*_KEYS, *(_BY_NAME[name] for name in names)), rows=rows, note=note)

    return [
        table("Speed", _SPEED, SPEED_NOTE),
        table("Bound and bubble", _BOUND, BOUND_NOTE),
        table("Traffic per step", _COST),
        Table(title="Workers, ms per step", columns=(*_KEYS, *_PER_WORKER), rows=detailed, note=PARTS_NOTE),
    ]


def plot_speed(rows: Sequence[Row], model: str) -> Plot:
    """Plot samples per second against link rate, or against chunks for a single link; a panel per worker count."""
    together = [row for row in rows if row["workers"] > 1]
    places = _places([row["link"] for row in together])
    links = list(places)
    over_links = len(links) != 1
    chunks = sorted({row["chunks"] for row in together if row["chunks"]}) or [1]
    ticks = {places[link]: link if link != "none" else "not shaped" for link in links}
    axis = ticks if over_links else {float(count): str(count) for count in chunks}
    named = [name for name in ("layout", "schedule", *(["chunks"] if over_links else [])) if _varies(name, together)]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in together:
        panel = panels.setdefault(f"{row['workers']} workers", {})
        # Rows without chunks are drawn as a horizontal line over all chunks.
        xs = [places[row["link"]]] if over_links else [row["chunks"]] if row["chunks"] else chunks
        panel.setdefault(_line(row, named), []).extend((x, row["samples_per_s"]) for x in xs)
    for row in (row for row in rows if row["workers"] == 1):
        for panel in panels.values():
            panel["single process"] = [(x, row["samples_per_s"]) for x in axis]
    return Plot(
        title=f"{model}: samples per second",
        x_label="link" if over_links else "chunks",
        y_label="samples per second",
        panels=panels or {"1 worker": {"single process": [(1, row["samples_per_s"]) for row in rows]}},
        x_log=True,
        x_ticks=axis,
    )


def _places(links: Sequence[str]) -> dict[str, float]:
    """Return x positions of links: their rate, or 1, 10, 100, ... if a link has more than a rate.

    Links that are not shaped are to the right.
    """
    named = list(dict.fromkeys(links))
    if not all(_ONE_RATE.fullmatch(link) for link in named):
        return {link: 10.0**place for place, link in enumerate(named)}
    rates = {link: found.plain_mbit_per_s for link in named if (found := parse_link(link)) is not None}
    right = 10 * max(filter(None, rates.values()), default=1.0)
    return {link: rates.get(link) or right for link in sorted(named, key=lambda link: rates.get(link) or right)}


def _varies(name: str, rows: Sequence[Row]) -> bool:
    return len({row[name] for row in rows if row["parallel"] == "pipeline"}) > 1


def _line(row: Row, named: Sequence[str]) -> str:
    if row["parallel"] == "data":
        return "data-parallel"
    chosen = [f"{row[name]} chunks" if name == "chunks" else row[name] for name in named]
    return " ".join(["pipeline", *chosen, _sender(row)])


def _sender(row: Row) -> str:
    return str(row["codec"]) if row["stage"] is None else f"{row['codec']}, torch's stage"
