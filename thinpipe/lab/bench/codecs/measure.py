"""Measurement of codecs: encoded size, error, and time.

All times are reported with that of a plain copy of the same tensor and of the reference implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.codecs import Codec, codec
from thinpipe.codecs.base import KernelCodec
from thinpipe.lab.bench.codecs.baselines import OfflinePCA
from thinpipe.lab.bench.codecs.codec_options import CodecBenchOptions
from thinpipe.lab.bench.codecs.synthetic import Case
from thinpipe.lab.records.record import Row, figure, row_of
from thinpipe.system import meter


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Squared error, bias, and error of zeros."""

    relative_error: float | None = figure("error", format=".1e", better="lower")
    snr_db: float | None = figure("SNR\ndB", format=".1f", better="higher")
    bias: float | None = figure("bias", format="+.1f")
    zero_error: float | None = figure("zeros", format=".1e", better="lower")
    zero_fraction: float = figure("zero\nvalues", format=".3f")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Encode and decode times, with multiples of a plain copy and of the memory-bandwidth floor.

    On a GPU caches are flushed before each call; the resident times are without flushing.
    """

    copy_ms: float = figure("copy\nms", format=".2f")
    encode_ms: float = figure("encode\nms", format=".2f", better="lower")
    encode_p95_ms: float = figure("encode\np95 ms", format=".2f", better="lower")
    decode_ms: float = figure("decode\nms", format=".2f", better="lower")
    decode_p95_ms: float = figure("decode\np95 ms", format=".2f", better="lower")
    encode_gb_per_s: float = figure("encode\nGB/s", format=".2f", better="higher")
    decode_gb_per_s: float = figure("decode\nGB/s", format=".2f", better="higher")
    encode_copies: float = figure("encode\ncopies", format=".1f", better="lower")
    decode_copies: float = figure("decode\ncopies", format=".1f", better="lower")
    encode_resident_ms: float | None = figure("encode\nresident", format=".3f", better="lower")
    decode_resident_ms: float | None = figure("decode\nresident", format=".3f", better="lower")
    encode_launch_ms: float | None = figure("encode\nlaunch", format=".3f", better="lower")
    first_encode_ms: float = figure("first\nms", format=".0f")
    encode_floors: float = figure("encode\nfloors", format=".1f", better="lower")
    decode_floors: float = figure("decode\nfloors", format=".1f", better="lower")
    reference_encode_ms: float | None = figure("literal\nms", format=".0f")
    encode_speedup: float | None = figure("times\nfaster", format=".0f", better="higher")


@dataclass(frozen=True, kw_only=True)
class CodecColumns:
    """The measurements of one codec on one tensor."""

    shape: str = figure("shape", key=True)
    content: str = figure("content", key=True)
    codec: str = figure("codec", key=True)
    tensor_bytes: int = figure("tensor\nbytes", format="d")
    wire_bytes: int = figure("wire\nbytes", format="d", better="lower")
    wire_ratio: float = figure("wire", format=".3f", better="lower")
    bits_per_value: float = figure("bits", format=".2f", better="lower")
    losses: Losses
    times: Times
    encode_extra_bytes: int | None = figure("extra\nbytes", format="d", better="lower")
    encode_extra_ratio: float | None = figure("extra\nmemory", format=".3f", better="lower")


def measure_losses(x: Tensor, decoded: Tensor) -> Losses:
    """Return the losses of a decoded tensor."""
    error = relative_squared_error(x, decoded)
    zero = x == 0
    return Losses(
        relative_error=error,
        snr_db=decibels(error),
        bias=bias(x, decoded),
        zero_error=zero_error(x, decoded, zero),
        zero_fraction=zero.double().mean().item(),
    )


def relative_squared_error(x: Tensor, decoded: Tensor) -> float | None:
    """Return squared error / squared norm: 0.01 is a hundredth of the energy; None for a tensor of zeros."""
    difference, size = decoded.double() - x.double(), x.double()
    energy = size.square().sum().item()
    return _finite(difference.square().sum().item() / energy if energy else math.nan)


def decibels(error: float | None) -> float | None:
    return -10 * math.log10(error) if error else None


def bias(x: Tensor, decoded: Tensor) -> float | None:
    """Return the mean error in standard errors of that mean: about -2 to 2 for an unbiased codec.

    None for a single value, whose deviation is undefined, and where all errors are equal and not zero.
    """
    difference = (decoded.double() - x.double()).reshape(-1)
    mean = difference.mean().item()
    if mean == 0:
        return 0.0
    deviation = difference.std().item() if difference.numel() > 1 else math.nan
    return _finite(mean / deviation * math.sqrt(difference.numel()) if deviation else math.nan)


def zero_error(x: Tensor, decoded: Tensor, zero: Tensor) -> float | None:
    """Return the root mean square of decoded zeros over that of the tensor; None if there are no zeros."""
    size = x.double().square().mean().sqrt().item()
    if not zero.any() or not size:
        return None
    return _finite(decoded[zero].double().square().mean().sqrt().item() / size)


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def measure_codecs(cases: Sequence[Case], codecs: Sequence[Codec], settings: CodecBenchOptions) -> Iterator[Row]:
    """Yield a row per tensor and codec, each as soon as it is measured."""
    largest = max(cases, key=lambda case: case.count)  # the first of several equal ones
    for case in cases:
        x = case.load().to(settings.found_device)
        with_reference = settings.reference == "all" or (settings.reference == "largest" and case is largest)
        for each in codecs:
            if isinstance(each, OfflinePCA):
                if case.load_before is None or not each.takes(x.shape):
                    continue
                each.learn(case.load_before().to(settings.found_device))
            yield row_of(_measure(case, x, each, settings, with_reference))


def _measure(case: Case, x: Tensor, codec_: Codec, settings: CodecBenchOptions, with_reference: bool) -> CodecColumns:
    wire = torch.empty(codec_.wire_bytes(x.shape, x.dtype), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x)
    tensor_bytes = x.numel() * x.element_size()
    times = _time(x, codec_, wire, decoded, settings, with_reference)
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
    x: Tensor, codec_: Codec, wire: Tensor, decoded: Tensor, settings: CodecBenchOptions, with_reference: bool
) -> Times:
    flush = meter.flush_caches(x.device) if x.device.type == "cuda" else None

    def timed(call: Callable[[], object], compiles: bool = False, resident: bool = False) -> meter.Times:
        return meter.time_calls(
            call,
            repeat=settings.repeat,
            budget_s=settings.budget,
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
    return Times(
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
