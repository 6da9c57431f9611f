"""Tables of the link benchmark, the line of a row, and a plot of time against size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from thinpipe.lab.bench.link.link_columns import LINE, LinkColumns
from thinpipe.lab.bench.link.probe import Probed
from thinpipe.lab.records.plot import Plot
from thinpipe.lab.records.record import Column, Row, columns_of
from thinpipe.lab.records.report import Table
from thinpipe.system.sizes import size_text

_BY_NAME = {column.name: column for column in columns_of(LinkColumns)}
_SIZE = Column(name="size", heading="tensor", key=True)
_TRANSFER = (
    *("messages", "wire_bytes", "p50_ms", "p95_ms", "gb_per_s", "recv_ms", "recv_gb_per_s", "late_ms"),
    *("line_ms", "residual", "chunks_to_hide"),
)
_CODEC = (
    *("wire_bytes", "encode_ms", "p50_ms", "decode_ms", "effective_gb_per_s", "of_uncompressed"),
    "pays_below_mbit_per_s",
)

# Rates are shown in Mbit/s, the unit of --link; records have GB/s, the unit of tensors.
_RATES = {
    "gb_per_s": "Mbit/s",
    "recv_gb_per_s": "recv bytes /\nrecv time Mbit/s",
    "effective_gb_per_s": "effective\nMbit/s",
}
_MBIT_PER_GB = 8e3

TRANSFER_NOTE = (
    "p50, p95: from the call of send until the message has arrived. recv time: from the call of recv, so a late\n"
    "sender counts. line: latency + bytes / bandwidth, fitted to all sizes. chunks that hide delay: number of\n"
    "messages in flight that keep the link busy for a round trip."
)
LINK_NOTE = (
    "down: from worker 1 to worker 0, the client; up: from it. loss: of small packets. rates: of one TCP connection."
)
CODEC_NOTE = (
    "effective: bytes of the tensor / (encode + transfer + decode). pays below: the rate at which a link saves\n"
    "as much time as encoding and decoding take; on a faster one the codec does not pay."
)


def row_line(row: Row, links: Iterable[str], codecs: Iterable[str]) -> str:
    """Return a row as one line, aligned with those of all links and codecs of the run."""
    link, codec = max(map(len, map(_named, links))), max(map(len, codecs))
    return (
        f"link {_named(row['link']):<{link}}  codec {row['codec']:<{codec}}  {row['ways']:<10} "
        f"{size_text(row['tensor_bytes']):>8}: p50 {row['p50_ms']:.3f} ms, p95 {row['p95_ms']:.3f} ms, "
        f"{rate_text(_MBIT_PER_GB * row['gb_per_s'])} Mbit/s"
    )


def rate_text(mbit_per_s: float) -> str:
    """Format a rate with three significant digits, or all before the point; never with an exponent."""
    return f"{mbit_per_s:.{_digits([mbit_per_s])}f}"


def _digits(rates: Iterable[float]) -> int:
    """Return the digits after the point with which the lowest of these rates has three significant ones."""
    lowest = min((rate for rate in rates if rate > 0), default=1.0)
    return min(max(2 - math.floor(math.log10(lowest)), 0), 6)


def _named(link: str) -> str:
    return "not shaped" if link == "none" else link


def result_tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables: links, transfers, fitted lines, and savings of codecs."""
    sized = [
        {**row, "size": size_text(row["tensor_bytes"]), **{name: _MBIT_PER_GB * row[name] for name in _RATES}}
        for row in rows
    ]
    keys = [_BY_NAME[name] for name in LINE]
    rates = {name: f".{_digits(row[name] for row in sized)}f" for name in _RATES}
    columns = _BY_NAME | {name: replace(_BY_NAME[name], heading=_RATES[name], format=rates[name]) for name in _RATES}

    def table(title: str, names: Sequence[str], chosen: Sequence[Row], note: str) -> Table:
        return Table(title=title, columns=[*keys, _SIZE, *(columns[name] for name in names)], rows=chosen, note=note)

    tables = [*_link_table(rows), table("Transfers", _TRANSFER, sized, TRANSFER_NOTE), _line_table(rows)]
    coded = [row for row in sized if row["codec"] != "none"]
    note = "\n".join([CODEC_NOTE, *_verdicts(coded)])
    return [*tables, *([table("With a codec", _CODEC, coded, note)] if coded else [])]


def _verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield, per codec, the rate above which it costs time: for the largest tensor, the lowest measured."""
    for spec in dict.fromkeys(row["codec"] for row in rows):
        of_codec = [row for row in rows if row["codec"] == spec and row["pays_below_mbit_per_s"] is not None]
        if of_codec:
            largest = max(row["tensor_bytes"] for row in of_codec)
            rate = min(row["pays_below_mbit_per_s"] for row in of_codec if row["tensor_bytes"] == largest)
            yield f"{spec} stops paying at {rate_text(rate)} Mbit/s for tensors of {size_text(largest)}."


def plot_times(rows: Sequence[Row]) -> Plot:
    """Plot time against bytes on the wire, both logarithmic, with the fitted line; a panel per link and direction."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        panel = panels.setdefault(f"{_named(row['link'])}, {row['ways']}", {})
        panel.setdefault(row["codec"], []).append((row["wire_bytes"], row["p50_ms"]))
        if row["codec"] == "none" and row.get("line_ms") is not None:
            panel.setdefault("latency + bytes / bandwidth", []).append((row["wire_bytes"], row["line_ms"]))
    return Plot(title="Time of a message", x_label="bytes on the wire", y_label="p50 ms", panels=panels, x_log=True)


def _link_table(rows: Sequence[Row]) -> list[Table]:
    """Return the table of the probed links; empty if none was probed."""
    probed = {row["link"]: row for row in rows if row["up_mbit_per_s"] is not None}
    columns = [_BY_NAME["link"], *columns_of(Probed)]
    return [Table(title="Links", columns=columns, rows=list(probed.values()), note=LINK_NOTE)] if probed else []


def _line_table(rows: Sequence[Row]) -> Table:
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.get("line_ms") is not None:
            lines.setdefault(tuple(row[name] for name in LINE), []).append(row)
    worst = Column(name="worst_residual", heading="farthest\noff it", format=".1%")
    names = ("latency_ms", "bandwidth_mbit_per_s", "of_nominal")
    return Table(
        title="Latency + bytes / bandwidth",
        columns=[*(_BY_NAME[name] for name in (*LINE, *names)), worst],
        rows=[{**same[0], "worst_residual": max(abs(row["residual"]) for row in same)} for same in lines.values()],
    )
