"""Views of the codec benchmark: tables of errors and costs, and a plot of error against bits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import fmean

from thinpipe.lab.bench.codecs.codec_columns import CodecColumns, Losses, decibels
from thinpipe.lab.records.plot import Plot
from thinpipe.lab.records.record import Column, Row, columns_of
from thinpipe.lab.records.report import Table

CONTENTS_ABREAST = 3  # the number that fits into 80 columns

_BY_NAME = {column.name: column for column in columns_of(CodecColumns)}
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
    _BY_NAME["encode_resident_ms"],
    _BY_NAME["decode_resident_ms"],
    _BY_NAME["encode_launch_ms"],
    replace(_BY_NAME["copy_ms"], format=".3f"),
    _BY_NAME["first_encode_ms"],
    _BY_NAME["encode_speedup"],
    _BY_NAME["encode_extra_ratio"],
)

# By column name; columns of losses have the content's name in front.
_EXPLAINED = {
    "wire_ratio": "wire: bytes sent / bytes of float32.",
    "bits_per_value": "bits: sent per value, header included.",
    "relative_error": "error: squared error / squared size.",
    "bias": "bias: mean error in standard errors of that mean; beyond 3 it is hardly chance.",
    "zero_error": "zeros: how many there are, and root mean square of what they decode to / of all.",
    "encode_copies": "copies: multiples of the time of a plain copy of the tensor.",
    "encode_speedup": "times faster: than encoding by the literal algorithm.",
    "encode_extra_ratio": "extra memory: while encoding, in tensors.",
}
_GPU_EXPLAINED = _EXPLAINED | {
    "encode_ms": "encode, decode, copy: on the GPU's clock, launches hidden, caches flushed before each call.",
    "encode_floors": "floors: multiples of the time to read the tensor and write the wire, or the other way round, at "
    "the speed of the copy.",
    "encode_resident_ms": "resident: caches hold what the call before left there, and launches count where they take "
    "longer.",
    "encode_launch_ms": "launch: time of the host for an encode.",
    "first_encode_ms": "first: the first call, which compiles what is not in Triton's cache.",
}

MEANS_NOTE = "Captured tensors: the mean over steps and chunks of a direction and link."
_CAPTURED = re.compile(r"(forward|backward)/(\d+-\d+)/.+")  # followed by tensor, step and chunk


def result_tables(rows: Sequence[Row], device: str = "cpu", by_bits: bool = False) -> list[Table]:
    """Return tables per shape: errors and zeros, which depend on the content, and costs.

    Columns are explained only under the tables of the first shape. ``by_bits`` sorts rows by bits per value.
    """
    result: list[Table] = []
    costs, all_explained = (_COSTS, _EXPLAINED) if device == "cpu" else (_GPU_COSTS, _GPU_EXPLAINED)
    for shape in _distinct(rows, "shape"):
        of_shape = [row for row in rows if row["shape"] == shape]
        if by_bits:
            of_shape.sort(key=itemgetter("bits_per_value"))
        means = mean_over_steps(of_shape)
        tensor = f"{shape}, {_size_text(of_shape[0]['tensor_bytes'])}"
        contents, tensors = _distinct(means, "content"), len(_distinct(of_shape, "content"))
        explained = {} if result else all_explained
        note = "" if result or len(contents) == tensors else MEANS_NOTE
        for start in range(0, len(contents), CONTENTS_ABREAST):
            some = [row for row in means if row["content"] in contents[start : start + CONTENTS_ABREAST]]
            rows_of_codecs = [_beside(codec_rows) for codec_rows in _by_codec(some)]
            for title, columns in (
                (f"{tensor}: what travels and what is lost", _loss_columns(some)),
                (f"{tensor}: bias and zeros", _zeros_columns(some)),
            ):
                result.append(
                    Table(
                        title=title,
                        columns=columns,
                        rows=rows_of_codecs,
                        note=note,
                        explained=_of_columns(columns, explained),
                    )
                )
        of_many = "contents" if len(contents) == tensors else "tensors"
        slowest = f", the slowest of {tensors} {of_many}" if tensors > 1 else ""
        result.append(
            Table(
                title=f"{tensor}: what it costs{slowest}",
                columns=(_BY_NAME["codec"], *costs),
                rows=[_cost_row(codec_rows, costs) for codec_rows in _by_codec(of_shape)],
                explained=explained,
            )
        )
    return result


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
        figures = [row[column.name] for row in rows if row[column.name] is not None]
        means[column.name] = fmean(figures) if figures else None
    return {**means, "snr_db": decibels(means["relative_error"])}


def _loss_columns(rows: Sequence[Row]) -> list[Column]:
    columns = [_BY_NAME["codec"], _BY_NAME["wire_ratio"], _BY_NAME["bits_per_value"]]
    for content in _distinct(rows, "content"):
        columns += [_of_content(content, "relative_error", f"{_lines(content)}\nerror"), _of_content(content, "snr_db")]
    return columns


def _zeros_columns(rows: Sequence[Row]) -> list[Column]:
    columns = [_BY_NAME["codec"], _BY_NAME["bits_per_value"]]
    for content in _distinct(rows, "content"):
        part = next(row["zero_fraction"] for row in rows if row["content"] == content)
        zeros = "zeros" if part is None else f"zeros\n{100 * part:.3g}%"
        columns += [_of_content(content, "bias", f"{_lines(content)}\nbias"), _of_content(content, "zero_error", zeros)]
    return columns


def _of_columns(columns: Sequence[Column], explained: Mapping[str, str]) -> dict[str, str]:
    """Return the explanations of columns, each once; a column's name may begin with that of a content."""
    found = {column.name: explained.get(column.name.split()[-1], "") for column in columns}
    return {name: sentence for name, sentence in found.items() if sentence}


def _of_content(content: str, name: str, heading: str | None = None) -> Column:
    """Return a column of one content, with the content in its name."""
    return replace(_BY_NAME[name], name=f"{content} {name}", heading=heading or _BY_NAME[name].heading)


def _lines(content: str) -> str:
    """Return the name of a direction and link on several lines, to head a narrow column."""
    return content.replace("/", "\n")


def _beside(rows: Sequence[Row]) -> Row:
    """Merge the rows of one codec into one, with the content in the names of the losses."""
    side_inputs = dict(rows[0])
    for row in rows:
        side_inputs |= {f"{row['content']} {column.name}": row[column.name] for column in columns_of(Losses)}
    return side_inputs


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


def _size_text(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:.1f} MB" if count_bytes >= 1e6 else f"{count_bytes / 1e3:.1f} kB"


def _by_codec(rows: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in rows if row["codec"] == codec] for codec in _distinct(rows, "codec")]


def _distinct(rows: Sequence[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))
