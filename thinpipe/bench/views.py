"""How the rows of the codec benchmark are shown: tables of what is lost and what it costs, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thinpipe.bench.codecs import COLUMNS
from thinpipe.measure.plot import Plot
from thinpipe.measure.record import Column, Row
from thinpipe.measure.report import Table

_BY_NAME = {column.name: column for column in COLUMNS}
_COSTS = tuple(
    _BY_NAME[name]
    for name in (
        "encode_ms",
        "decode_ms",
        "encode_gb_per_s",
        "decode_gb_per_s",
        "encode_copies",
        "decode_copies",
        "encode_speedup",
        "encode_extra_ratio",
    )
)
_GPU_COSTS = (
    replace(_BY_NAME["encode_ms"], format=".3f"),
    replace(_BY_NAME["decode_ms"], format=".3f"),
    _BY_NAME["encode_floors"],
    _BY_NAME["decode_floors"],
    replace(_BY_NAME["copy_ms"], format=".3f"),
    _BY_NAME["first_encode_ms"],
    _BY_NAME["encode_speedup"],
    _BY_NAME["encode_extra_ratio"],
)

LOSS_NOTE = "wire: bytes sent / bytes of float32. error: squared error / squared size."
COST_NOTE = (
    "copies: times of a plain copy of the tensor. times faster: than encoding by the\n"
    "literal algorithm. extra memory: while encoding, tensors."
)
GPU_COST_NOTE = (
    "floors: times of reading the tensor and writing the wire, or the other way round, at the\n"
    "speed of the copy. first: the first call, which compiles what is not in Triton's cache."
)


def result_tables(rows: Sequence[Row], device: str = "cpu") -> list[Table]:
    """Two tables per shape: what is lost, which depends on the content, and what it costs, which hardly does.

    The notes that explain the columns stand under the first two alone.
    """
    result: list[Table] = []
    costs, cost_note = (_COSTS, COST_NOTE) if device == "cpu" else (_GPU_COSTS, f"{COST_NOTE}\n{GPU_COST_NOTE}")
    for shape in _distinct(rows, "shape"):
        of_shape = [row for row in rows if row["shape"] == shape]
        tensor = f"{shape}, {_size_text(of_shape[0]['tensor_bytes'])}"
        contents = _distinct(of_shape, "content")
        result.append(
            Table(
                title=f"{tensor}: what travels and what is lost",
                columns=_loss_columns(contents),
                rows=[_loss_row(codec_rows) for codec_rows in _by_codec(of_shape)],
                note="" if result else LOSS_NOTE,
            )
        )
        slowest = f", the slowest of {len(contents)} contents" if len(contents) > 1 else ""
        result.append(
            Table(
                title=f"{tensor}: what it costs{slowest}",
                columns=(_BY_NAME["codec"], *costs),
                rows=[_cost_row(codec_rows, costs) for codec_rows in _by_codec(of_shape)],
                note="" if len(result) > 1 else cost_note,
            )
        )
    return result


def plot_error_against_bits(rows: Sequence[Row]) -> Plot:
    """The rows of the first shape: a panel per content, a line per family; what loses nothing has no place in it."""
    shape = rows[0]["shape"]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["shape"] != shape:
            continue
        panel = panels.setdefault(row["content"], {})
        if row["relative_error"]:
            family = row["codec"].partition(":")[0]
            panel.setdefault(family, []).append((32 * row["wire_ratio"], row["relative_error"]))
    return Plot(
        title=f"Error against bits, {shape}",
        x_label="bits per value on the wire",
        y_label="squared error / squared size",
        panels=panels,
    )


def _loss_columns(contents: Sequence[str]) -> list[Column]:
    columns = [_BY_NAME["codec"], _BY_NAME["wire_ratio"]]
    for content in contents:
        error, snr = _BY_NAME["relative_error"], _BY_NAME["snr_db"]
        columns.append(replace(error, name=f"{content} error", heading=f"{content}\nerror"))
        columns.append(replace(snr, name=f"{content} snr"))
    return columns


def _loss_row(rows: Sequence[Row]) -> Row:
    shown = {"codec": rows[0]["codec"], "wire_ratio": rows[0]["wire_ratio"]}
    for row in rows:
        shown[f"{row['content']} error"] = row["relative_error"]
        shown[f"{row['content']} snr"] = row["snr_db"]
    return shown


def _cost_row(rows: Sequence[Row], costs: Sequence[Column]) -> Row:
    """The worst of the contents in every figure: nobody chooses what the tensors hold."""
    worst: dict[str, object] = {"codec": rows[0]["codec"]}
    for column in costs:
        values = [row[column.name] for row in rows if row[column.name] is not None]
        if values:
            worst[column.name] = min(values) if column.better == "higher" else max(values)
    return worst


def _size_text(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:.1f} MB" if count_bytes >= 1e6 else f"{count_bytes / 1e3:.1f} kB"


def _by_codec(rows: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in rows if row["codec"] == codec] for codec in _distinct(rows, "codec")]


def _distinct(rows: Sequence[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))
