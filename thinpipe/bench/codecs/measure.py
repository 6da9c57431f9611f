"""Measuring codecs: every time stands beside a plain copy of the same tensor, and beside the literal algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from thinpipe.bench.codecs.figures import Figures, Times, measure_losses
from thinpipe.bench.codecs.learned import Learned
from thinpipe.bench.codecs.settings import Settings
from thinpipe.bench.codecs.synthetic import Case
from thinpipe.codecs import Codec, codec
from thinpipe.codecs.base import KernelCodec
from thinpipe.measure import meter
from thinpipe.measure.record import Row, row_of


def measure_codecs(cases: Sequence[Case], codecs: Sequence[Codec], settings: Settings) -> Iterator[Row]:
    """One row per tensor and codec, as each is done."""
    largest = max(cases, key=lambda case: case.count)  # the first of them, where several are as large
    for case in cases:
        x = case.load().to(settings.found_device)
        with_reference = settings.reference == "all" or (settings.reference == "largest" and case is largest)
        for each in codecs:
            if isinstance(each, Learned):
                if case.load_before is None or not each.takes(x.shape):
                    continue
                each.learn(case.load_before().to(settings.found_device))
            yield row_of(_measure(case, x, each, settings, with_reference))


def _measure(case: Case, x: Tensor, codec_: Codec, settings: Settings, with_reference: bool) -> Figures:
    wire = torch.empty(codec_.wire_bytes(x.shape, x.dtype), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x)
    tensor_bytes = x.numel() * x.element_size()
    times = _time(x, codec_, wire, decoded, settings, with_reference)
    extra_bytes = meter.peak_extra_bytes(lambda: codec_.encode(x, out=wire), device=x.device)
    return Figures(
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


def _time(x: Tensor, codec_: Codec, wire: Tensor, decoded: Tensor, settings: Settings, with_reference: bool) -> Times:
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
    # Reading one of tensor and wire and writing the other, at the speed of the copy, which does both to the tensor.
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
        first_encode_ms=first_ms,
        encode_floors=encoding.median_ms / floor_ms,
        decode_floors=decoding.median_ms / floor_ms,
        reference_encode_ms=reference_ms,
        encode_speedup=None if reference_ms is None else reference_ms / encoding.median_ms,
    )
