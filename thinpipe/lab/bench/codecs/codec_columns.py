"""Columns of the codec benchmark, and the losses of a decoded tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from thinpipe.lab.records.record import figure


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Squared error, bias, and error of zeros."""

    relative_error: float | None = figure("error", format=".1e", better="lower")
    snr_db: float | None = figure("SNR\ndB", format=".1f", better="higher")
    bias: float | None = figure("bias", format="+.1f")
    zero_error: float | None = figure("zeros", format=".1e", better="lower")
    zero_fraction: float = figure("zero\nvalues", format=".3f")


@dataclass(frozen=True, kw_only=True)
class CodecTimes:
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
    times: CodecTimes
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
