"""Tables of the data-parallel benchmark, the line of a row, and a plot of speed against replicas."""

from __future__ import annotations

from thinpipe.lab.bench.ddp.ddp_columns import COLUMNS
from thinpipe.lab.records.plot import Plot
from thinpipe.lab.records.record import Record, Row
from thinpipe.lab.records.report import Table

_IN_TITLE = ("model", "ddp", "device", "batch_size")


def row_line(row: Row) -> str:
    """Return a row as one line: quartiles are of the slowest replica, examples/s of one replica."""
    place = f"{row['replicas']} {'GPUs' if row['device'] == 'cuda' else 'CPUs'}, {row['group']}"
    line = f"{row['model']}, {place}: p50 {row['p50_s']:.4f} s, p95 {row['p95_s']:.4f} s, "
    line += f"{row['p50_examples_per_s']:.0f} examples/s"
    if row["wire_bytes"] is None:
        return line
    gradient_bytes, wire_bytes = row["gradient_bytes"], row["wire_bytes"]
    ratio = wire_bytes / gradient_bytes
    return f"{line}, {gradient_bytes / 1e6:.2f} MB of gradients sent as {wire_bytes / 1e6:.2f} MB, {ratio:.3f}"


def result_tables(record: Record) -> list[Table]:
    """Return a table per model."""
    columns = [column for column in COLUMNS if column.name not in _IN_TITLE]
    models = dict.fromkeys(row["model"] for row in record.rows)
    return [
        Table(
            title=f"{model} with batch size {record.config['batch_size']}",
            columns=columns,
            rows=[row for row in record.rows if row["model"] == model],
            note=_note(record),
        )
        for model in models
    ]


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


def _note(record: Record) -> str:
    config = record.config
    codec = config["compress"] and f"{config['compress']} with error feedback"
    gradients = codec or config["hook"] or "uncompressed"
    return f"backend: {config['backend']}. gradients: {gradients}, buckets of {config['bucket_cap_mb']:g} MiB."
