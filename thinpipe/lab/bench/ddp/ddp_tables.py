"""Views of the data-parallel benchmark: a line per group, and the comparison of two records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from rich.text import Text

from thinpipe.lab.bench.ddp.ddp_columns import COLUMNS, PERCENTILES
from thinpipe.lab.records.diff import BETTER, WORSE, Diff, Pair, number
from thinpipe.lab.records.plot import Plot
from thinpipe.lab.records.record import Record, Row
from thinpipe.lab.records.report import Table

WIDE = 118  # width of a row of the benchmark, in characters
WIDE_DIFF = 82  # width of a row of the comparison
DIFF_PERCENTILES = (75, 95)
DIFF_NOTE = "diff: change of ex/sec; where it is below 0, the test is slower."

_BY_NAME = {column.name: column for column in COLUMNS}


def heading_lines(record: Record) -> Iterator[str]:
    """Yield a description of the run, printed before the first row is measured."""
    facts, config = record.environment, record.config
    yield f"thinpipe {record.thinpipe}: iteration time of DistributedDataParallel"
    yield ""
    yield f"* torch: {facts['torch']}"
    yield f"* CUDA: {facts['cuda'] or '-'}"
    rate, link = config["link_mbit_per_s"], config.get("link")
    over = (link["file"] if isinstance(link, dict) else link) or (None if rate is None else f"{rate:g} Mbit/s")
    yield f"* backend: {config['backend']}" + ("" if over is None else f", over {over}")
    yield f"* on: {', '.join(facts['devices']) or facts['cpu']}, {facts['threads']} threads per replica"
    yield f"* gradients: {_gradients(record)}"
    yield ""
    if facts["topology"]:
        yield from ("--- nvidia-smi topo -m ---", "", facts["topology"], "", "-" * 26, "")


def model_lines(row: Row, width: int) -> Iterator[str]:
    """Yield the heading of a model's rows, of which ``row`` is the first."""
    yield f"Benchmark: {row['model']} with batch size {row['batch_size']}"
    yield ""
    columns = "sec/iter    ex/sec      "
    yield (" " * 28 + columns * (4 if width >= WIDE else 2)).rstrip()


def row_lines(row: Row, width: int) -> Iterator[str]:
    """Yield the row of one group: one line, or two if the terminal is narrow."""
    label = f"{row['replicas']:>4} {_noun(row)} -- {row['group']:>8}:"
    cells = [f"  p{p}:{_seconds(row, p):>8}{row[f'p{p}_examples_per_s']:>8.0f}/s" for p in PERCENTILES]
    if width >= WIDE:
        yield label + "".join(cells)
    else:
        yield label + "".join(cells[:2])
        yield " " * len(label) + "".join(cells[2:])
    if row["wire_bytes"] is not None:
        whole, wire = row["gradient_bytes"], row["wire_bytes"]
        sent = f"{whole / 1e6:.2f} MB of gradients sent as {wire / 1e6:.2f} MB, {wire / whole:.3f}"
        yield " " * len(label) + f"  {sent}"


def result_tables(record: Record) -> list[Table]:
    """Return a table per model, for a Markdown page."""
    shown = [column for column in COLUMNS if column.name not in ("model", "ddp", "device", "batch_size")]
    tables = []
    for model in dict.fromkeys(row["model"] for row in record.rows):
        rows = [row for row in record.rows if row["model"] == model]
        title = f"{model} with batch size {rows[0]['batch_size']}"
        tables.append(Table(title=title, columns=shown, rows=rows))
    return tables


def plot_speed(record: Record) -> Plot:
    """Plot examples per second of one replica against the number of replicas; a panel per model.

    The decline over the number of replicas is the cost of communication.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in record.rows:
        line = panels.setdefault(row["model"], {}).setdefault(row["ddp"], [])
        line.append((row["replicas"], row["p50_examples_per_s"]))
    counts = sorted({row["replicas"] for row in record.rows})
    return Plot(
        title="DistributedDataParallel: examples per second of one replica",
        x_label="replicas",
        y_label="examples per second",
        panels=panels,
        x_log=True,
        x_ticks={float(count): str(count) for count in counts},
    )


def has_times(diff: Diff) -> bool:
    """Return True if the rows have all columns that ``diff_lines`` shows."""
    figures = [f"p{p}_{what}" for p in DIFF_PERCENTILES for what in ("s", "examples_per_s")]
    rows = [row for pair in diff.pairs for row in (pair.baseline, pair.test)]
    return all(
        all(name in row for name in ("model", "ddp", "device", "batch_size", "group", "replicas"))
        and all(number(row, _BY_NAME[name]) is not None for name in figures)
        for row in rows
    )


def diff_lines(diff: Diff, width: int) -> Iterator[Text]:
    """Yield, for each model and group, the test's times and the change of its throughput from the baseline."""
    for model in dict.fromkeys(pair.test["model"] for pair in diff.pairs):
        pairs = [pair for pair in diff.pairs if pair.test["model"] == model]
        yield Text(f"Benchmark: {model} with batch size {_both(pairs[0], 'batch_size')}")
        yield Text()
        columns = "  sec/iter    ex/sec      diff      "
        yield Text((" " * 16 + columns * (2 if width >= WIDE_DIFF else 1)).rstrip())
        for pair in pairs:
            yield from _diff_rows(pair, width)
        yield Text()
    yield Text(DIFF_NOTE)


def without_times(diff: Diff) -> Diff:
    """Return the diff without sec/iter, whose change is already given by that of ex/sec."""
    return replace(diff, columns=tuple(each for each in diff.columns if not re.fullmatch(r"p\d+_s", each.name)))


def on_page(diff: Diff) -> Diff:
    """Return the diff with only the columns that fit on a page."""
    return replace(diff, columns=tuple(_BY_NAME[f"p{p}_examples_per_s"] for p in DIFF_PERCENTILES))


def _diff_rows(pair: Pair, width: int) -> Iterator[Text]:
    row = pair.test
    label = f"{row['replicas']:>4} {_noun(row)}:" if row["ddp"] == "ddp" else f"{row['group']:>9}:"
    line = Text(label)
    for i, p in enumerate(DIFF_PERCENTILES):
        if i and width < WIDE_DIFF:
            yield line
            line = Text(" " * len(label))
        change = pair.change(_BY_NAME[f"p{p}_examples_per_s"]) or 0.0
        line.append(f"  p{p}:{_seconds(row, p):>10}{row[f'p{p}_examples_per_s']:>8.0f}/s")
        line.append(f"{change:>+10.1%}", style=BETTER if change > 0 else WORSE if change < 0 else "")
    yield line


def _seconds(row: Row, percentile: int) -> str:
    seconds = row[f"p{percentile}_s"]
    return f"{seconds:.3f}s" if seconds >= 0.01 else f"{seconds:.4f}s"


def _noun(row: Row) -> str:
    return "GPUs" if row["device"] == "cuda" else "CPUs"


def _both(pair: Pair, name: str) -> str:
    before, after = pair.baseline[name], pair.test[name]
    return f"{after}" if before == after else f"{before} vs {after}"


def _gradients(record: Record) -> str:
    config = record.config
    how = config["compress"] and f"{config['compress']} with error feedback"
    return f"{how or config['hook'] or 'uncompressed'}, buckets of {config['bucket_cap_mb']:g} MiB"
