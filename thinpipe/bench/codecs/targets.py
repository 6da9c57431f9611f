"""What the codecs should cost, held against the rows of a benchmark: missed where the machine is unlike.

On a CPU counted in copies of the tensor, which carry from machine to machine better than milliseconds do; on a GPU in
milliseconds of an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from thinpipe.measure.record import Check, Row

SHAPE = "32x32x112x112"  # large enough that caches do not help
EXTRA_MEMORY_RATIO = 0.25
EXTRA_MEMORY_BYTES = 8_000_000  # of smaller tensors the measurement's own error is too large a part


@dataclass(frozen=True, kw_only=True)
class Target:
    """Limits for one codec."""

    codec: str
    encode_copies: float  # at most
    decode_copies: float  # at most
    speedup: float | None = None  # over the literal algorithm, at least
    literal: str | None = None  # the codec whose literal algorithm that is, where it is not this one


# Of tiles two to three times what two cores took (benchmarks/codecs_few_bits_2cores_2026-11-15.md): machines differ in
# how fast they copy.
TARGETS = (
    Target(codec="tile:8", encode_copies=2, decode_copies=2.5),
    Target(codec="tile:8+zero", encode_copies=3, decode_copies=4),
    Target(codec="tile:4", encode_copies=2, decode_copies=3.5),
    Target(codec="tile:4+zero", encode_copies=3, decode_copies=4),
    Target(codec="gauss:4", encode_copies=6, decode_copies=4),
    Target(codec="uniform:8", encode_copies=6, decode_copies=3),
    Target(codec="sort:6+2", encode_copies=12, decode_copies=3, speedup=40),
    Target(codec="fast:6+2", encode_copies=12, decode_copies=3, speedup=40, literal="sort:6+2"),
    Target(codec="kmeans:4", encode_copies=15, decode_copies=4, speedup=100),
)


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """Limits for one codec on one tensor, in milliseconds of an H200 whose caches are flushed before every call."""

    codec: str
    shape: str
    encode_ms: float
    decode_ms: float | None = None


LARGE, SMALL = "256x32x112x112", "32x128x768"  # 411 and 12.6 MB
GPU_TARGETS = (
    GpuTarget(codec="tile:8", shape=LARGE, encode_ms=0.15, decode_ms=0.13),
    GpuTarget(codec="tile:8+zero", shape=LARGE, encode_ms=0.15, decode_ms=0.13),
    GpuTarget(codec="tile:4", shape=LARGE, encode_ms=0.15, decode_ms=0.13),
    GpuTarget(codec="tile:4+zero", shape=LARGE, encode_ms=0.15, decode_ms=0.13),
    GpuTarget(codec="tile:2/64", shape=LARGE, encode_ms=0.15, decode_ms=0.13),
    GpuTarget(codec="tile:2/64+zero", shape=LARGE, encode_ms=0.15, decode_ms=0.13),
    GpuTarget(codec="gauss:4", shape=LARGE, encode_ms=0.35, decode_ms=0.25),
    GpuTarget(codec="uniform:8", shape=LARGE, encode_ms=0.24, decode_ms=0.15),
    GpuTarget(codec="sort:6+2", shape=LARGE, encode_ms=0.33, decode_ms=0.15),
    GpuTarget(codec="fast:6+2", shape=LARGE, encode_ms=0.33, decode_ms=0.15),
    GpuTarget(codec="sort:9+3", shape=LARGE, encode_ms=0.50, decode_ms=0.20),
    GpuTarget(codec="sort:12+4", shape=LARGE, encode_ms=0.50, decode_ms=0.20),
    GpuTarget(codec="kmeans:4", shape=LARGE, encode_ms=0.45, decode_ms=0.15),
    GpuTarget(codec="topk:0.1", shape=LARGE, encode_ms=0.60, decode_ms=0.30),
    GpuTarget(codec="tile:8", shape=SMALL, encode_ms=0.015),
    GpuTarget(codec="tile:4", shape=SMALL, encode_ms=0.015),
    GpuTarget(codec="tile:2/64", shape=SMALL, encode_ms=0.015),
    GpuTarget(codec="sort:6+2", shape=SMALL, encode_ms=0.06),
    GpuTarget(codec="kmeans:4", shape=SMALL, encode_ms=0.1),
    GpuTarget(codec="topk:0.1", shape=SMALL, encode_ms=0.08),
)


def check_gpu_targets(rows: Sequence[Row]) -> Iterator[Check]:
    """The targets that these rows can speak about, each at its worst content."""
    for target in GPU_TARGETS:
        found = [row for row in rows if (row["codec"], row["shape"]) == (target.codec, target.shape)]
        for name in ("encode_ms", "decode_ms"):
            if found and getattr(target, name) is not None:
                worst = max(found, key=itemgetter(name))
                yield Check(
                    claim=f"{target.codec}, {target.shape}: {name.removesuffix('_ms')}",
                    measured=worst[name],
                    limit=getattr(target, name),
                    unit=" ms",
                    detail=worst["content"],
                    required=False,
                )


def check_targets(rows: Sequence[Row]) -> Iterator[Check]:
    """The targets that these rows can speak about, each at its worst content."""
    for target in TARGETS:
        of_codec = [row for row in rows if row["codec"] == target.codec and row["shape"] == SHAPE]
        if not of_codec:
            continue
        for name in ("encode_copies", "decode_copies"):
            yield Check(
                claim=f"{target.codec}, {SHAPE}: {name.replace('_', ' in ')}",
                measured=max(row[name] for row in of_codec),
                limit=getattr(target, name),
                required=False,
            )
        literal = target.literal or target.codec
        literal_ms = {
            row["content"]: row["reference_encode_ms"]
            for row in rows
            if row["codec"] == literal and row["shape"] == SHAPE and row["reference_encode_ms"] is not None
        }
        speedups = [literal_ms[row["content"]] / row["encode_ms"] for row in of_codec if row["content"] in literal_ms]
        if target.speedup and speedups:
            yield Check(
                claim=f"{target.codec}, {SHAPE}: times the speed of the literal {literal}",
                measured=min(speedups),
                limit=target.speedup,
                bound="at least",
                required=False,
            )
    large = [row for row in rows if row["tensor_bytes"] >= EXTRA_MEMORY_BYTES]
    seen = [row for row in large if row["encode_extra_ratio"] is not None]
    if seen:
        worst = max(seen, key=lambda row: row["encode_extra_ratio"])
        yield Check(
            claim="every codec, from 8 MB on: encode, extra memory",
            measured=worst["encode_extra_ratio"],
            limit=EXTRA_MEMORY_RATIO,
            detail=f"{worst['codec']}, {worst['content']}, {worst['shape']}",
            required=False,
        )
