"""Compare a record of `thinpipe bench codecs` with the speeds that the codecs are built for, on the machines below.

    thinpipe bench codecs --json RECORD.json
    python benchmarks/codec_targets.py RECORD.json

Targets of a GPU, in milliseconds with flushed caches, are only for that GPU. Targets of CPUs are multiples of the time
of a plain copy, which vary less between machines; they are two to three times the measurement on two cores
(benchmarks/codec_speed). A slower machine may miss them: MISS is not an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path

from thinpipe.lab.records import report
from thinpipe.lab.records.record import Check, Record, Row

LARGE, SMALL = "256x32x112x112", "32x128x768"  # 411 and 12.6 MB
CPU_SHAPE = "32x32x112x112"  # larger than the caches
EXTRA_MEMORY_RATIO = 0.25  # of the tensor, while encoding
EXTRA_MEMORY_BYTES = 8_000_000  # for smaller tensors the measurement error is too large
# Part of the name of a GPU -> shape -> codec -> milliseconds of encode and decode, at most; None: no target.
GPU_TARGETS: dict[str, dict[str, dict[str, tuple[float, float | None]]]] = {
    "H200": {
        LARGE: {
            **dict.fromkeys(("tile:8", "tile:8+zero", "tile:4", "tile:4+zero"), (0.15, 0.13)),
            **dict.fromkeys(("tile:2/64", "tile:2/64+zero"), (0.15, 0.13)),
            "gauss:4": (0.35, 0.25),
            "uniform:8": (0.24, 0.15),
            **dict.fromkeys(("sort:6+2", "fast:6+2"), (0.33, 0.15)),
            **dict.fromkeys(("sort:9+3", "sort:12+4"), (0.50, 0.20)),
            "kmeans:4": (0.45, 0.15),
            "topk:0.1": (0.60, 0.30),
        },
        SMALL: {
            **dict.fromkeys(("tile:8", "tile:4", "tile:2/64"), (0.015, None)),
            "sort:6+2": (0.06, None),
            "kmeans:4": (0.1, None),
            "topk:0.1": (0.08, None),
        },
    }
}
# Codec -> encode and decode in copies of the tensor, at most.
CPU_TARGETS = {
    "tile:8": (2, 2.5),
    "tile:8+zero": (3, 4),
    "tile:4": (2, 3.5),
    "tile:4+zero": (3, 4),
    "gauss:4": (6, 4),
    "uniform:8": (6, 3),
    "sort:6+2": (12, 3),
    "fast:6+2": (12, 3),
    "kmeans:4": (15, 4),
}
# Codec -> the codec whose reference implementation it is compared with, and how many times faster it is, at least.
SPEEDUPS = {"sort:6+2": ("sort:6+2", 40), "fast:6+2": ("sort:6+2", 40), "kmeans:4": ("kmeans:4", 100)}


def targets(record: Record) -> Iterator[Check]:
    """Yield the targets of the record's machine, each at its worst content; none for GPUs that are not in the table."""
    if record.config["device"] == "cpu":
        yield from _cpu_targets(record.rows)
    for name, shapes in GPU_TARGETS.items():
        if record.config["device"] != "cpu" and any(name in device for device in record.environment["devices"]):
            for shape, codecs in shapes.items():
                for codec, limits in codecs.items():
                    yield from _at_most(record.rows, codec, shape, ("encode_ms", "decode_ms"), limits)


def _cpu_targets(rows: Sequence[Row]) -> Iterator[Check]:
    for codec, limits in CPU_TARGETS.items():
        yield from _at_most(rows, codec, CPU_SHAPE, ("encode_copies", "decode_copies"), limits)
    for codec, (literal, limit) in SPEEDUPS.items():
        literal_ms = {row["content"]: row["reference_encode_ms"] for row in _rows(rows, literal, CPU_SHAPE)}
        ratios = [
            literal_ms[row["content"]] / row["encode_ms"]
            for row in _rows(rows, codec, CPU_SHAPE)
            if literal_ms.get(row["content"]) is not None
        ]
        if ratios:
            claim = f"{codec}, {CPU_SHAPE}: speed relative to the reference implementation of {literal}"
            yield Check(claim=claim, measured=min(ratios), limit=limit, bound="at least", required=False)
    large = [row for row in rows if row["tensor_bytes"] >= EXTRA_MEMORY_BYTES and row["encode_extra_ratio"] is not None]
    if large:
        worst = max(large, key=itemgetter("encode_extra_ratio"))
        yield Check(
            claim="all codecs, from 8 MB on: extra memory while encoding",
            measured=worst["encode_extra_ratio"],
            limit=EXTRA_MEMORY_RATIO,
            detail=f"{worst['codec']}, {worst['content']}, {worst['shape']}",
            required=False,
        )


def _at_most(
    rows: Sequence[Row], codec: str, shape: str, names: Sequence[str], limits: Sequence[float | None]
) -> Iterator[Check]:
    found = _rows(rows, codec, shape)
    for name, limit in zip(names, limits, strict=True):
        if found and limit is not None:
            worst = max(found, key=itemgetter(name))
            claim, detail = f"{codec}, {shape}: {name}", worst["content"]
            yield Check(claim=claim, measured=worst[name], limit=limit, detail=detail, required=False)


def _rows(rows: Sequence[Row], codec: str, shape: str) -> list[Row]:
    return [row for row in rows if (row["codec"], row["shape"]) == (codec, shape)]


if __name__ == "__main__":
    report.show([report.check_table(targets(Record.read(Path(sys.argv[1]))))])
