"""Measurement of codecs: encoded size, error, and time.

All times are reported with that of a plain copy of the same tensor and of the reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from thinpipe.codecs import Codec, codec
from thinpipe.codecs.base import KernelCodec
from thinpipe.lab.bench import meter
from thinpipe.lab.bench.codecs.baselines import OfflinePCA
from thinpipe.lab.bench.codecs.codec_columns import CodecColumns, CodecTimes, measure_losses
from thinpipe.lab.bench.codecs.codec_options import CodecBenchOptions
from thinpipe.lab.bench.codecs.codec_tables import plot_error_against_bits, result_tables
from thinpipe.lab.bench.codecs.synthetic import Case
from thinpipe.lab.bench.codecs.verify import NOTE, verify_codecs
from thinpipe.lab.bench.outcome import Outcome, Print
from thinpipe.lab.records.record import Record, Row, columns_of, row_of


def measure(options: CodecBenchOptions, on_row: Print, on_progress: Print) -> Outcome:
    """Measure and, if requested, verify the codecs."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)  # also the number of threads of the codecs
    cases, device = options.cases(), options.found_device
    rows, expected = [], len(options.codecs) * len(cases)
    for row in measure_codecs(cases, options.codecs, options):
        rows.append(row)
        on_progress(f"{len(rows)} of {expected}: {row['codec']} on {row['content']} {row['shape']}")
    checks = []
    for check in verify_codecs(cases, device) if options.verify else ():
        checks.append(check)
        on_progress(f"verifying: {check.claim}")
    record = Record(
        kind="bench codecs",
        config={
            "device": str(device),
            "repeat": options.repeat,
            "budget_s": options.budget,
            "reference": options.reference,
        },
        columns=columns_of(CodecColumns),
        rows=tuple(rows),
        checks=tuple(checks),
    )
    tables, plot = result_tables(rows, device.type, options.by_bits), plot_error_against_bits(rows)
    return Outcome(title="Codecs", record=record, tables=tables, plot=plot, note=NOTE)


def measure_codecs(cases: Sequence[Case], codecs: Sequence[Codec], options: CodecBenchOptions) -> Iterator[Row]:
    """Yield a row per tensor and codec, each as soon as it is measured."""
    largest = max(cases, key=lambda case: case.count)  # the first of several equal ones
    for case in cases:
        x = case.load().to(options.found_device)
        with_reference = options.reference == "all" or (options.reference == "largest" and case is largest)
        for each in codecs:
            if isinstance(each, OfflinePCA):
                if case.load_before is None or not each.takes(x.shape):
                    continue
                each.learn(case.load_before().to(options.found_device))
            yield row_of(_measure_codec(case, x, each, options, with_reference))


def _measure_codec(
    case: Case, x: Tensor, codec_: Codec, options: CodecBenchOptions, with_reference: bool
) -> CodecColumns:
    wire = torch.empty(codec_.wire_bytes(x.shape, x.dtype), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x)
    tensor_bytes = x.numel() * x.element_size()
    times = _time(x, codec_, wire, decoded, options, with_reference)
    extra_bytes = meter.peak_extra_bytes(lambda: codec_.encode(x, out=wire), device=x.device)
    return CodecColumns(
        shape=case.shape_text,
        content=case.content,
        codec=codec_.spec,
        tensor_bytes=tensor_bytes,
        wire_bytes=wire.numel(),
        wire_ratio=wire.numel() / (4 * x.numel()),
        bits_per_value=8 * wire.numel() / x.numel(),
        losses=measure_losses(x, decoded),
        times=times,
        encode_extra_bytes=extra_bytes,
        encode_extra_ratio=None if extra_bytes is None else extra_bytes / tensor_bytes,
    )


def _time(
    x: Tensor, codec_: Codec, wire: Tensor, decoded: Tensor, options: CodecBenchOptions, with_reference: bool
) -> CodecTimes:
    flush = meter.flush_caches(x.device) if x.device.type == "cuda" else None

    def timed(call: Callable[[], object], compiles: bool = False, resident: bool = False) -> meter.Times:
        return meter.time_calls(
            call,
            repeat=options.repeat,
            budget_s=options.budget,
            compiles=compiles,
            device=x.device,
            between=None if resident else flush,
        )

    compiles = isinstance(codec_, KernelCodec)

    def encode() -> Tensor:
        return codec_.encode(x, out=wire)

    def decode() -> Tensor:
        return codec_.decode(wire, decoded)

    first_ms = meter.elapsed_ms(encode, device=x.device)
    copy = timed(lambda: decoded.copy_(x))
    encoding, decoding = timed(encode, compiles), timed(decode, compiles)
    resident = (
        (timed(encode, resident=True).median_ms, timed(decode, resident=True).median_ms) if flush else (None, None)
    )
    reference_ms = None
    if with_reference and isinstance(codec_, KernelCodec):
        literal = codec(codec_.spec, kernels="reference")
        reference_ms = timed(lambda: literal.encode(x, out=wire)).median_ms
    tensor_bytes = x.numel() * x.element_size()
    # Reading the tensor and writing the wire, or the reverse, at the bandwidth of the copy, which reads and writes the
    # tensor.
    floor_ms = copy.median_ms * (tensor_bytes + wire.numel()) / (2 * tensor_bytes)
    return CodecTimes(
        copy_ms=copy.median_ms,
        encode_ms=encoding.median_ms,
        encode_p95_ms=encoding.p95_ms,
        decode_ms=decoding.median_ms,
        decode_p95_ms=decoding.p95_ms,
        encode_gb_per_s=tensor_bytes / encoding.median_ms / 1e6,
        decode_gb_per_s=tensor_bytes / decoding.median_ms / 1e6,
        encode_copies=encoding.median_ms / copy.median_ms,
        decode_copies=decoding.median_ms / copy.median_ms,
        encode_resident_ms=resident[0],
        decode_resident_ms=resident[1],
        encode_launch_ms=meter.launch_ms(encode, x.device) if flush else None,
        first_encode_ms=first_ms,
        encode_floors=encoding.median_ms / floor_ms,
        decode_floors=decoding.median_ms / floor_ms,
        reference_encode_ms=reference_ms,
        encode_speedup=None if reference_ms is None else reference_ms / encoding.median_ms,
    )
