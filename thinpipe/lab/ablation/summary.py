"""Summary of ablation results: a table per task, the failed runs, and a plot of the metric against bits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from thinpipe.codecs.recipes import RECIPES
from thinpipe.lab.ablation.results import COLUMNS, KEYS, Method, method_row, places, rows_of, varied_columns
from thinpipe.lab.records.plot import Plot
from thinpipe.lab.records.record import Column, Row
from thinpipe.lab.records.report import Table

_NOTE = (
    "wire ratio: bytes sent / bytes of float32, both directions, all that travels. ±: standard deviation over seeds.\n"
    "p: chance of a difference to none this large if there were none, by a paired t-test over seeds.\n"
    "loss added: validation loss minus that of none with the same seed. encode, decode: time in the codecs per step,\n"
    "summed over all links."
)
_FAILED = (Column(name="name", heading="run", key=True), Column(name="error", heading="error", key=True))
_Point = tuple[float, float, float, float]  # bits; mean, worst and best seed of the metric


def result_tables(found: Sequence[Method], waiting: int = 0) -> list[Table]:
    """Return the tables; ``waiting`` is the number of runs of the plan without a result, shown in a note."""
    tables = [_task_table(task, of_task) for task, of_task in _by_task(found).items()]
    notes = [_NOTE]
    if waiting:
        notes.append(f"Runs of the plan without a result: {waiting}.")
    if len(places(found)) > 1:
        notes.append("From several machines or settings, so speeds are not comparable:")
        notes += [f"  {count} runs: {place}" for place, count in places(found).items()]
    if tables:
        tables[-1] = replace(tables[-1], note="\n".join(notes))
    failed = [{"name": result.name, "error": result.error} for method in found for result in method.failed]
    return [*tables, *([Table(title="Failed runs", columns=_FAILED, rows=failed)] if failed else [])]


def with_spread(middle: float, spread: float | None, form: str) -> str:
    """Return ``98.1% ± 0.3%``; without a deviation if there is one seed."""
    text = format(middle, form)
    return text if spread is None else f"{text} ± {format(spread, form.removeprefix('+'))}"


def plot_metric_against_bits(title: str, found: Sequence[Method]) -> Plot:
    """Plot the metric against bits per value, a line per codec family.

    Each task and setting has two panels: the full range, and the range around the uncompressed run, which is a band.
    """
    panels: dict[str, dict[str, list[_Point]]] = {}
    bands: dict[str, tuple[float, float]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    labels = []
    for method in found:
        row = method_row(method)
        name = " ".join([row["task"], *(f"{option} {value}" for option, value in method.runs[0].varied.items())])
        panel = panels.setdefault(name, {})
        if not method.done:
            continue
        metric = method.done[0].metric
        scale = 100 if method.done[0].metric_format.endswith("%") else 1
        labels.append(f"{metric}, %" if scale == 100 else metric)
        middle, worst, best = (scale * row[f"{metric}_{statistic}"] for statistic in ("mean", "worst", "best"))
        if row["codec"] == "none":
            bands[name] = (middle, scale * (row[f"{metric}_std"] or 0.0))
            ranges[name] = _near(bands[name], method.done[0].metric_better)
        elif row["bits_per_value"] is not None:
            bits = row["bits_per_value"]
            panel.setdefault(_line(row["codec"], bits, panel), []).append((bits, middle, worst, best))
    failed = sum(len(method.failed) for method in found)
    for name in [name for name in panels if name in bands]:
        close = f"{name}, close to none"
        bands[close], ranges[close] = bands[name], ranges.pop(name)
    shown = [each for name in panels for each in (name, f"{name}, close to none") if each == name or each in bands]
    return Plot(
        title=f"{title} ({failed} failed runs are not in it)" if failed else title,
        x_label="bits per value on the wire",
        y_label=" / ".join(dict.fromkeys(labels)),
        panels={name: panels[name.removesuffix(", close to none")] for name in shown},
        x_log=True,
        x_ticks=_ticks([point[0] for panel in panels.values() for line in panel.values() for point in line]),
        y_log=False,
        y_ranges=ranges,
        bands=bands,
        band_label="none ± std",
    )


def _near(band: tuple[float, float], better: str) -> tuple[float, float]:
    """Return the y range from a few percent worse than the uncompressed run to slightly better than its deviation."""
    middle, spread = band
    worse, than = max(6 * spread, 0.04 * middle), max(3 * spread, 0.015 * middle)
    return (middle - worse, middle + than) if better == "higher" else (middle - than, middle + worse)


def _ticks(bits: Sequence[float]) -> dict[float, str]:
    """Return the powers of two that enclose these values, with their labels."""
    if not bits:
        return {}
    low, high = math.floor(math.log2(min(bits))), math.ceil(math.log2(max(bits)))
    return {2.0**power: f"{2.0**power:g}" for power in range(low, high + 1)}


def _line(codec: str, bits: float, panel: Mapping[str, Sequence[_Point]]) -> str:
    """Return the codec's family, or the codec itself if the family has a point with as many bits (2+2 and 3+1)."""
    if codec in RECIPES:
        return "recipe"
    family = re.sub(r":[^/,)]*(/\d[^/,)]*)?", "", codec)  # a slash precedes a tile size or separates the directions
    taken = any(abs(other[0] - bits) < 0.01 * bits for other in panel.get(family, []))
    return codec if taken else family


def _task_table(task: str, found: Sequence[Method]) -> Table:
    done = next((result for method in found for result in method.done), None)
    metric = done.metric if done else "metric"
    varied = dict.fromkeys(name for method in found for name in method.runs[0].varied)
    rows = []
    for method, row in zip(found, rows_of(found), strict=True):
        shown: dict[str, Any] = {**row, "seeds": _seeds_text(method)}
        if done and method.done:
            shown[metric] = with_spread(row[f"{metric}_mean"], row.get(f"{metric}_std"), done.metric_format)
        if row["loss_added"] is not None:
            shown["loss_added"] = with_spread(row["loss_added"], row["loss_added_std"], COLUMNS["loss_added"].format)
        rows.append(shown)
    columns = (
        KEYS[1],
        *varied_columns(varied),
        COLUMNS["wire_ratio"],
        Column(name=metric, heading=f"{metric}\nmean ± std"),
        Column(name=f"{metric}_worst", heading="worst\nseed", format=done.metric_format if done else ""),
        COLUMNS["p_value"],
        Column(name="loss_added", heading="loss added\nmean ± std"),
        Column(name="seeds", heading="seeds"),
        COLUMNS["samples_per_s"],
        COLUMNS["wire_mb_per_step"],
        COLUMNS["encode_ms_per_step"],
        COLUMNS["decode_ms_per_step"],
    )
    return Table(title=task, columns=columns, rows=rows, style=_style)


def _seeds_text(method: Method) -> str:
    count = f"{len(method.done)} of {len(method.runs)}"
    return f"{count}, {len(method.failed)} failed" if method.failed else count


def _style(row: Row, column: Column) -> str:
    return "bold red" if column.name == "seeds" and row["seeds_failed"] else ""


def _by_task(found: Sequence[Method]) -> dict[str, list[Method]]:
    tasks: dict[str, list[Method]] = {}
    for method in found:
        tasks.setdefault(method.runs[0].settings["task"], []).append(method)
    return tasks
