"""The codec benchmark: what each codec sends, loses and costs, on each tensor.

Every time stands beside a plain copy of the same tensor, measured next to it, and beside the literal algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinpipe.bench import losses
from thinpipe.bench.contents import Case
from thinpipe.codecs import Codec, codec
from thinpipe.codecs.base import KernelCodec
from thinpipe.measure.meter import Times, elapsed_ms, peak_extra_bytes, time_calls
from thinpipe.measure.record import Column, Row

DEFAULT_SHAPES = ((32, 32, 112, 112), (32, 1280, 7, 7), (8, 128, 768), (16, 24, 56, 56))
DEFAULT_GPU_SHAPES = ((256, 32, 112, 112), (32, 128, 768))
DEFAULT_CODECS = (
    "none,fp16,bf16,uniform:4,uniform:8,sort:4,sort:8,sort:12,sort:16,fast:4,fast:8,"
    "kmeans:2,kmeans:4,kmeans:8,tile:4,svd:14,power:14,topk:0.01,topk:0.1"
)

COLUMNS = (
    Column(name="shape", heading="shape", key=True),
    Column(name="content", heading="content", key=True),
    Column(name="codec", heading="codec", key=True),
    Column(name="tensor_bytes", heading="tensor\nbytes", format="d"),
    Column(name="wire_bytes", heading="wire\nbytes", format="d", better="lower"),
    Column(name="wire_ratio", heading="wire", format=".3f", better="lower"),
    Column(name="bits_per_value", heading="bits", format=".2f", better="lower"),
    *losses.COLUMNS,
    Column(name="copy_ms", heading="copy\nms", format=".2f"),
    Column(name="encode_ms", heading="encode\nms", format=".2f", better="lower"),
    Column(name="encode_p95_ms", heading="encode\np95 ms", format=".2f", better="lower"),
    Column(name="decode_ms", heading="decode\nms", format=".2f", better="lower"),
    Column(name="decode_p95_ms", heading="decode\np95 ms", format=".2f", better="lower"),
    Column(name="encode_gb_per_s", heading="encode\nGB/s", format=".2f", better="higher"),
    Column(name="decode_gb_per_s", heading="decode\nGB/s", format=".2f", better="higher"),
    Column(name="encode_copies", heading="encode\ncopies", format=".1f", better="lower"),
    Column(name="decode_copies", heading="decode\ncopies", format=".1f", better="lower"),
    Column(name="first_encode_ms", heading="first\nms", format=".0f"),
    Column(name="encode_floors", heading="encode\nfloors", format=".1f", better="lower"),
    Column(name="decode_floors", heading="decode\nfloors", format=".1f", better="lower"),
    Column(name="reference_encode_ms", heading="literal\nms", format=".0f"),
    Column(name="encode_speedup", heading="times\nfaster", format=".0f", better="higher"),
    Column(name="encode_extra_bytes", heading="extra\nbytes", format="d", better="lower"),
    Column(name="encode_extra_ratio", heading="extra\nmemory", format=".3f", better="lower"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the benchmark measures."""

    device: torch.device
    repeat: int  # of each call, at most
    budget_s: float  # for the repeats of one call; at least one is always made
    reference: Literal["largest", "all", "none"]  # which tensors the literal algorithms run on


def measure_codecs(cases: Sequence[Case], codecs: Sequence[Codec], settings: Settings) -> Iterator[Row]:
    """One row per tensor and codec, as each is done."""
    largest = max(cases, key=lambda case: case.count)  # the first of them, where several are as large
    for case in cases:
        x = case.load().to(settings.device)
        with_reference = settings.reference == "all" or (settings.reference == "largest" and case is largest)
        for each in codecs:
            yield {
                "shape": case.shape_text,
                "content": case.content,
                "codec": each.spec,
                **_measure(x, each, settings, with_reference),
            }


def _measure(x: Tensor, codec_: Codec, settings: Settings, with_reference: bool) -> Row:
    def timed(call: Callable[[], object], compiles: bool = False) -> Times:
        return time_calls(
            call, repeat=settings.repeat, budget_s=settings.budget_s, compiles=compiles, device=settings.device
        )

    wire = torch.empty(codec_.wire_bytes(x.shape, x.dtype), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x)
    compiles = isinstance(codec_, KernelCodec)
    first_ms = elapsed_ms(lambda: codec_.encode(x, out=wire), device=settings.device)
    copy = timed(lambda: decoded.copy_(x))
    encode = timed(lambda: codec_.encode(x, out=wire), compiles)
    decode = timed(lambda: codec_.decode(wire, decoded), compiles)
    extra_bytes = peak_extra_bytes(lambda: codec_.encode(x, out=wire), device=settings.device)
    lost = losses.measure_losses(x, decoded)
    reference_ms = None
    if with_reference and isinstance(codec_, KernelCodec):
        literal = codec(codec_.spec, kernels="reference")
        reference_ms = timed(lambda: literal.encode(x, out=wire)).median_ms
    tensor_bytes = x.numel() * x.element_size()
    # Reading one of tensor and wire and writing the other, at the speed of the copy, which does both to the tensor.
    floor_ms = copy.median_ms * (tensor_bytes + wire.numel()) / (2 * tensor_bytes)
    return {
        "tensor_bytes": tensor_bytes,
        "wire_bytes": wire.numel(),
        "wire_ratio": wire.numel() / (4 * x.numel()),
        "bits_per_value": 8 * wire.numel() / x.numel(),
        **lost,
        "copy_ms": copy.median_ms,
        "encode_ms": encode.median_ms,
        "encode_p95_ms": encode.p95_ms,
        "decode_ms": decode.median_ms,
        "decode_p95_ms": decode.p95_ms,
        "encode_gb_per_s": tensor_bytes / encode.median_ms / 1e6,
        "decode_gb_per_s": tensor_bytes / decode.median_ms / 1e6,
        "encode_copies": encode.median_ms / copy.median_ms,
        "decode_copies": decode.median_ms / copy.median_ms,
        "first_encode_ms": first_ms,
        "encode_floors": encode.median_ms / floor_ms,
        "decode_floors": decode.median_ms / floor_ms,
        "reference_encode_ms": reference_ms,
        "encode_speedup": None if reference_ms is None else reference_ms / encode.median_ms,
        "encode_extra_bytes": extra_bytes,
        "encode_extra_ratio": None if extra_bytes is None else extra_bytes / tensor_bytes,
    }
