"""How the rows of the link benchmark are shown: as each is known, as tables, as a plot of time against size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thinpipe.bench.link.probe import Probed
from thinpipe.bench.link.rows import LINE, Figures
from thinpipe.measure.plot import Plot
from thinpipe.measure.record import Column, Row, columns_of
from thinpipe.measure.report import Table
from thinpipe.measure.sizes import size_text

_BY_NAME = {column.name: column for column in columns_of(Figures)}
_SIZE = Column(name="size", heading="tensor", key=True)
_TRANSFER = (
    *("messages", "wire_bytes", "p50_ms", "p95_ms", "gb_per_s", "recv_ms", "recv_gb_per_s", "late_ms"),
    *("line_ms", "residual", "chunks_to_hide"),
)
_CODEC = (
    *("wire_bytes", "encode_ms", "p50_ms", "decode_ms", "effective_gb_per_s", "of_uncompressed"),
    "pays_below_mbit_per_s",
)

TRANSFER_NOTE = (
    "p50, p95: from when the sender hands a message over until it is there. recv time: from when the receiver\n"
    "wants it, so a late sender counts. line: latency + bytes / bandwidth through all sizes. chunks that hide\n"
    "delay: so many messages under way keep the link busy for a round trip."
)
LINK_NOTE = (
    "down: from worker 1 to worker 0, the client; up: from it. loss: of small packets. rates: of one TCP connection."
)
CODEC_NOTE = (
    "effective: bytes of the tensor / (encode + transfer + decode). pays below: the rate at which a link saves\n"
    "as much time as encoding and decoding take; on a faster one the codec does not pay."
)


def row_line(row: Row) -> str:
    """One size in one line."""
    return (
        f"{row['link']:>8} {row['codec']:<10} {row['ways']:<9} {size_text(row['tensor_bytes']):>8}: "
        f"p50 {row['p50_ms']:.3f} ms, p95 {row['p95_ms']:.3f} ms, {row['gb_per_s']:.4f} GB/s"
    )


def result_tables(rows: Sequence[Row]) -> list[Table]:
    """Links; transfers; the lines through them; what codecs are worth."""
    sized = [{**row, "size": size_text(row["tensor_bytes"])} for row in rows]
    keys = [_BY_NAME[name] for name in LINE]

    def table(title: str, names: Sequence[str], chosen: Sequence[Row], note: str) -> Table:
        return Table(title=title, columns=[*keys, _SIZE, *(_BY_NAME[name] for name in names)], rows=chosen, note=note)

    tables = [*_link_table(rows), table("Transfers", _TRANSFER, sized, TRANSFER_NOTE), _line_table(rows)]
    coded = [row for row in sized if row["codec"] != "none"]
    note = "\n".join([CODEC_NOTE, *_verdicts(coded)])
    return [*tables, *([table("With a codec", _CODEC, coded, note)] if coded else [])]


def _verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """From which rate on each codec stops paying for the largest tensor that was sent, by its slowest measurement."""
    for spec in dict.fromkeys(row["codec"] for row in rows):
        of_codec = [row for row in rows if row["codec"] == spec and row["pays_below_mbit_per_s"] is not None]
        if of_codec:
            largest = max(row["tensor_bytes"] for row in of_codec)
            rate = min(row["pays_below_mbit_per_s"] for row in of_codec if row["tensor_bytes"] == largest)
            yield f"{spec} stops paying at {rate / 1e3:.2g} Gbit/s for tensors of {size_text(largest)}."


def plot_times(rows: Sequence[Row]) -> Plot:
    """Time against bytes on the wire, both logarithmic: what was measured, and the line; a panel per link and way."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        link = "not shaped" if row["link"] == "none" else row["link"]
        panel = panels.setdefault(f"{link}, {row['ways']}", {})
        panel.setdefault(row["codec"], []).append((row["wire_bytes"], row["p50_ms"]))
        if row["codec"] == "none" and row.get("line_ms") is not None:
            panel.setdefault("latency + bytes / bandwidth", []).append((row["wire_bytes"], row["line_ms"]))
    return Plot(title="Time of a message", x_label="bytes on the wire", y_label="p50 ms", panels=panels, x_log=True)


def _link_table(rows: Sequence[Row]) -> list[Table]:
    """What every link is, where that was measured."""
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
