"""Rows of the link benchmark: percentiles of transfer times, bandwidths, and the gain of a codec."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinpipe.lab.bench.link.probe import Probed
from thinpipe.lab.bench.meter import Times
from thinpipe.lab.records.record import Row, column, row_of
from thinpipe.links.counters import LinkEnd
from thinpipe.pipeline.report import match, transfer_s
from thinpipe.train.shaping import Shaping, link_text


@dataclass(frozen=True)
class Line:
    """The linear latency model of a message: latency + size / bandwidth."""

    latency_ms: float
    bytes_per_ms: float

    def ms(self, size: float) -> float:
        return self.latency_ms + size / self.bytes_per_ms


def fit_line(sizes: Sequence[float], times_ms: Sequence[float]) -> Line | None:
    """Return the weighted least-squares line through times by size; None if sizes are equal or times do not grow.

    Weights are 1 / time: large messages determine the bandwidth, small ones the latency.
    """
    x, t = np.asarray(sizes, float), np.asarray(times_ms, float)
    if len(set(sizes)) < 2 or t.min() <= 0:
        return None
    rows = np.stack([np.ones_like(x), x], axis=1) / np.sqrt(t)[:, None]
    (latency, slope), *_ = np.linalg.lstsq(rows, np.sqrt(t), rcond=None)
    if latency < 0:  # latency is not negative: refit the line through zero
        latency, slope = 0.0, float(np.sum(x) / np.sum(x**2 / t))
    return Line(float(latency), 1 / float(slope)) if slope > 0 else None


def pays_below_mbit_per_s(tensor_bytes: int, wire_bytes: int, codec_ms: float) -> float | None:
    """Return the rate at which a codec saves as much transfer time as encoding and decoding take.

    8 MB sent as 2 MB save 6 MB; if the codec takes 6 ms, that is 1 MB per ms, 8000 Mbit/s: on a faster link the codec
    does not pay. None if nothing is saved, or if the codec takes no time.
    """
    saved = tensor_bytes - wire_bytes
    return saved * 8 / codec_ms / 1e3 if saved > 0 and codec_ms > 0 else None


def chunks_to_hide(round_trip_ms: float | None, chunk_ms: float) -> int | None:
    """Return the number n of chunks that hide a round trip: n - 1 of them take at least as long."""
    return None if round_trip_ms is None or chunk_ms <= 0 else 1 + math.ceil(round_trip_ms / chunk_ms)


KIND = "bench link"
_CLOCK_MS = 1e-3  # clocks of machines agree to half a round trip: measured transfer times may be 0
LINE = ("link", "codec", "ways")  # rows that differ only in size are fitted by one line


@dataclass(frozen=True, kw_only=True)
class LinkColumns:
    """Messages of one size over one link; ``with_lines`` adds the columns that follow from all sizes."""

    link: str = column("link", key=True)
    codec: str = column("codec", key=True)
    ways: str = column("ways", key=True)
    tensor_bytes: int = column("tensor\nbytes", key=True, format="d")
    backend: str = column("backend")
    messages: int = column("messages", format="d")
    wire_bytes: int = column("wire\nbytes", format="d", better="lower")
    p50_ms: float = column("p50\nms", format=".3f", better="lower")
    p95_ms: float = column("p95\nms", format=".3f", better="lower")
    gb_per_s: float = column("GB/s", format=".4f", better="higher")
    recv_ms: float = column("recv\ntime ms", format=".3f")
    recv_gb_per_s: float = column("recv bytes /\nrecv time GB/s", format=".4f")
    late_ms: float = column("sender\nlate ms", format=".3f")
    encode_ms: float | None = column("encode\nms", format=".3f", better="lower")
    decode_ms: float | None = column("decode\nms", format=".3f", better="lower")
    effective_gb_per_s: float = column("effective\nGB/s", format=".4f", better="higher")
    of_uncompressed: float | None = column("times un-\ncompressed", format=".2f", better="higher", default=None)
    pays_below_mbit_per_s: float | None = column("pays below\nMbit/s", format=".0f", better="higher")
    latency_ms: float | None = column("latency\nms", format=".3f", better="lower", default=None)
    bandwidth_mbit_per_s: float | None = column("bandwidth\nMbit/s", format=".1f", better="higher", default=None)
    nominal_mbit_per_s: float | None = column("nominal\nMbit/s", format="g")  # None if there is no single rate
    of_nominal: float | None = column("of\nnominal", format=".3f", default=None)
    chunks_to_hide: int | None = column("chunks that\nhide delay", format="d", better="lower", default=None)
    probed: Probed
    line_ms: float | None = column("line\nms", format=".3f", default=None)
    residual: float | None = column("off the\nline", format="+.1%", default=None)


def make_row(
    link: Shaping | None,
    backend: str,
    spec: str,
    ways: str,
    tensor_bytes: int,
    ends: Sequence[LinkEnd],
    probed: Probed,
) -> Row:
    """Return the row of messages of one size, from the link ends of both workers."""
    sends, receives = ([end for end in ends if end.sends is kind] for kind in (True, False))
    pairs = [pair for send in sends for receive in receives if _same(send, receive) for pair in match(send, receive)]
    transfers = Times(tuple(transfer_s(sent, received) * 1e3 for sent, received in pairs))
    blocked = Times(tuple((received.end - received.start) * 1e3 for _, received in pairs))
    late = Times(tuple(max(sent.start - received.start, 0.0) * 1e3 for sent, received in pairs))
    wire_bytes = pairs[0][1].wire_bytes
    messages = sum(end.counters.messages for end in receives)
    encode_ms = sum(end.counters.encode_ms for end in sends) / messages
    decode_ms = sum(end.counters.decode_ms for end in receives) / messages
    codec_ms = encode_ms + decode_ms
    return row_of(
        LinkColumns(
            link=link_text(link),
            codec=spec,
            ways=ways,
            tensor_bytes=tensor_bytes,
            backend=backend,
            messages=messages,
            wire_bytes=wire_bytes,
            p50_ms=transfers.median_ms,
            p95_ms=transfers.p95_ms,
            gb_per_s=_gb_per_s(wire_bytes, transfers.median_ms),
            recv_ms=blocked.median_ms,
            recv_gb_per_s=_gb_per_s(wire_bytes, blocked.median_ms),
            late_ms=late.median_ms,
            encode_ms=encode_ms or None,
            decode_ms=decode_ms or None,
            effective_gb_per_s=_gb_per_s(tensor_bytes, transfers.median_ms + codec_ms),
            pays_below_mbit_per_s=pays_below_mbit_per_s(tensor_bytes, wire_bytes, codec_ms),
            nominal_mbit_per_s=_nominal(link, sends),
            probed=probed,
        )
    )


def with_lines(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the line through all sizes, their residuals, and the speedup over no codec."""
    plain = {(row["link"], row["ways"], row["tensor_bytes"]): row for row in rows if row["codec"] == "none"}
    result: list[Row] = []
    for row in rows:
        same = [other for other in rows if all(other[name] == row[name] for name in LINE)]
        line = fit_line([other["wire_bytes"] for other in same], [other["p50_ms"] for other in same])
        more: dict[str, Any] = {}
        if line is not None:
            mbit_per_s, nominal = line.bytes_per_ms * 8 / 1e3, row["nominal_mbit_per_s"]
            line_ms = line.ms(row["wire_bytes"])
            more = {
                "latency_ms": line.latency_ms,
                "bandwidth_mbit_per_s": mbit_per_s,
                "of_nominal": None if nominal is None else mbit_per_s / nominal,
                "chunks_to_hide": chunks_to_hide(row["round_trip_ms"], row["wire_bytes"] / line.bytes_per_ms),
                "line_ms": line_ms,
                "residual": row["p50_ms"] / line_ms - 1,
            }
        if row["codec"] != "none":
            uncompressed = plain[row["link"], row["ways"], row["tensor_bytes"]]
            more["of_uncompressed"] = row["effective_gb_per_s"] / uncompressed["effective_gb_per_s"]
        result.append({**row, **more})
    return result


def _gb_per_s(size: int, ms: float) -> float:
    return size / max(ms, _CLOCK_MS) / 1e6


def _nominal(link: Shaping | None, sends: Sequence[LinkEnd]) -> float | None:
    """Return the link's rate in the direction of these ends; None if they have different rates."""
    rates = set() if link is None else {link.paths(2)[end.source, end.target].queues[0].mbit_per_s for end in sends}
    return rates.pop() if len(rates) == 1 else None


def _same(send: LinkEnd, receive: LinkEnd) -> bool:
    return (send.source, send.target) == (receive.source, receive.target)
