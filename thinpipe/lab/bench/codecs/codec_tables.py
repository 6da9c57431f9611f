"""Tables of the codec benchmark: errors and costs; and a plot of error against bits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import fmean

from thinpipe.lab.bench.codecs.codec_columns import CodecColumns, Losses, decibels
from thinpipe.lab.records.plot import Plot
from thinpipe.lab.records.record import Column, Row, columns_of
from thinpipe.lab.records.report import Table

_BY_NAME = {column.name: column for column in columns_of(CodecColumns)}
_COSTS = (
    *("encode_ms", "decode_ms", "encode_gb_per_s", "decode_gb_per_s", "encode_copies", "decode_copies"),
    *("encode_speedup", "encode_extra_ratio"),
)
_GPU_COSTS = (
    *("encode_ms", "decode_ms", "encode_floors", "decode_floors", "encode_resident_ms", "decode_resident_ms"),
    *("encode_launch_ms", "copy_ms", "first_encode_ms", "encode_speedup", "encode_extra_ratio"),
)
_GPU_FORMATS = dict.fromkeys(("encode_ms", "decode_ms", "copy_ms"), ".3f")

_LOSSES = ("codec", "wire_ratio", "bits_per_value", "relative_error", "snr_db", "bias", "zero_error")

_EXPLAINED = {
    "wire_ratio": "wire: bytes sent / bytes of float32.",
    "bits_per_value": "bits: sent per value, header included.",
    "relative_error": "error: squared error / squared size.",
    "bias": "bias: mean error in standard errors of that mean; beyond 3 it is hardly chance.",
    "zero_error": "zeros: root mean square of the decoded zeros / of all values.",
    "encode_copies": "copies: multiples of the time of a plain copy of the tensor.",
    "encode_speedup": "times faster: than encoding by the reference implementation.",
    "encode_extra_ratio": "extra memory: while encoding, in tensors.",
}
_GPU_EXPLAINED = _EXPLAINED | {
    "encode_ms": "encode, decode, copy: on the GPU's clock, launches hidden, caches flushed before each call.",
    "encode_floors": "floors: multiples of the time to read the tensor and write the wire, or the reverse, at "
    "the speed of the copy.",
    "encode_resident_ms": "resident: caches hold what the call before left there, and launches count where they take "
    "longer.",
    "encode_launch_ms": "launch: time of the host for an encode.",
    "first_encode_ms": "first: the first call, which compiles what is not in Triton's cache.",
}

MEANS_NOTE = "Captured tensors: the mean over steps and chunks of a direction and link."
_CAPTURED = re.compile(r"(forward|backward)/(\d+-\d+)/.+")  # followed by tensor, step and chunk


def result_tables(rows: Sequence[Row], device: str = "cpu", by_bits: bool = False) -> list[Table]:
    """Return tables per shape: errors of each content, and costs.

    Columns are explained only under the tables of the first shape. ``by_bits`` sorts rows by bits per value.
    """
    result: list[Table] = []
    explained = _EXPLAINED if device == "cpu" else _GPU_EXPLAINED
    for shape in _distinct(rows, "shape"):
        of_shape = [row for row in rows if row["shape"] == shape]
        if by_bits:
            of_shape.sort(key=itemgetter("bits_per_value"))
        result += [*_loss_tables(of_shape, explained), _cost_table(of_shape, device, explained)]
        explained = {}
    return result


def _loss_tables(rows: Sequence[Row], explained: Mapping[str, str]) -> Iterator[Table]:
    """Yield a table of errors per content."""
    means = mean_over_steps(rows)
    contents = _distinct(means, "content")
    note = MEANS_NOTE if explained and len(contents) < len(_distinct(rows, "content")) else ""
    for content in contents:
        of_content = [row for row in means if row["content"] == content]
        zeros = f", {100 * of_content[0]['zero_fraction']:.3g}% zeros" if of_content[0]["zero_fraction"] else ""
        title = f"{_tensor_text(rows)}, {content}{zeros}: size and error"
        columns = [_BY_NAME[name] for name in _LOSSES]
        yield Table(title=title, columns=columns, rows=of_content, note=note, explained=explained)
        note, explained = "", {}


def _cost_table(rows: Sequence[Row], device: str, explained: Mapping[str, str]) -> Table:
    names, formats = (_COSTS, {}) if device == "cpu" else (_GPU_COSTS, _GPU_FORMATS)
    costs = [replace(_BY_NAME[name], format=formats.get(name, _BY_NAME[name].format)) for name in names]
    contents, tensors = len(_distinct(mean_over_steps(rows), "content")), len(_distinct(rows, "content"))
    slowest = f", the slowest of {tensors} {'contents' if contents == tensors else 'tensors'}" if tensors > 1 else ""
    return Table(
        title=f"{_tensor_text(rows)}: costs{slowest}",
        columns=(_BY_NAME["codec"], *costs),
        rows=[_cost_row(codec_rows, costs) for codec_rows in _by_codec(rows)],
        explained=explained,
    )


def plot_error_against_bits(rows: Sequence[Row]) -> Plot:
    """Plot the rows of the first shape: a panel per content, a line per family; lossless codecs are omitted."""
    shape = rows[0]["shape"]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in mean_over_steps([row for row in rows if row["shape"] == shape]):
        panel = panels.setdefault(row["content"], {})
        if row["relative_error"]:
            panel.setdefault(_family(row["codec"]), []).append((row["bits_per_value"], row["relative_error"]))
    return Plot(
        title=f"Error against bits, {shape}",
        x_label="bits per value on the wire",
        y_label="squared error / squared size",
        panels=panels,
    )


def mean_over_steps(rows: Sequence[Row]) -> list[Row]:
    """Return the mean row of the captured tensors of a direction, link, shape and codec; other rows are unchanged."""
    together: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        captured = _CAPTURED.fullmatch(row["content"])
        content = "/".join(captured.groups()) if captured else row["content"]
        together.setdefault((row["shape"], content, row["codec"]), []).append(row)
    return [{**same[0], "content": content, **_means(same)} for (_, content, _), same in together.items()]


def _means(rows: Sequence[Row]) -> Row:
    means: dict[str, float | None] = {}
    for column in columns_of(Losses):
        values = [row[column.name] for row in rows if row[column.name] is not None]
        means[column.name] = fmean(values) if values else None
    return {**means, "snr_db": decibels(means["relative_error"])}


def _family(spec: str) -> str:
    """Return the family of a spec, which has one line in the plot: ``sort:3+1+zero`` belongs to ``sort+zero``."""
    name, _, argument = spec.partition(":")
    return "+".join([name, *(part for part in argument.split("+") if part.isalpha())])


def _cost_row(rows: Sequence[Row], costs: Sequence[Column]) -> Row:
    """Return the worst value over the contents for each column, since the content of tensors is not a choice."""
    worst: dict[str, object] = {"codec": rows[0]["codec"]}
    for column in costs:
        values = [row[column.name] for row in rows if row[column.name] is not None]
        if values:
            worst[column.name] = min(values) if column.better == "higher" else max(values)
    return worst


def _tensor_text(rows: Sequence[Row]) -> str:
    size = rows[0]["tensor_bytes"]
    return f"{rows[0]['shape']}, {size / 1e6:.1f} MB" if size >= 1e6 else f"{rows[0]['shape']}, {size / 1e3:.1f} kB"


def _by_codec(rows: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in rows if row["codec"] == codec] for codec in _distinct(rows, "codec")]


def _distinct(rows: Sequence[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))
