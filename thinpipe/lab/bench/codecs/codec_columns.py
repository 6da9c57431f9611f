"""Columns of the codec benchmark, and the losses of a decoded tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from thinpipe.lab.records.record import column


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Squared error, bias, and error of zeros."""

    relative_error: float | None = column("error", format=".1e", better="lower")
    snr_db: float | None = column("SNR\ndB", format=".1f", better="higher")
    bias: float | None = column("bias", format="+.1f")
    zero_error: float | None = column("zeros", format=".1e", better="lower")
    zero_fraction: float = column("zero\nvalues", format=".3f")


@dataclass(frozen=True, kw_only=True)
class CodecTimes:
    """Encode and decode times, with multiples of a plain copy and of the memory-bandwidth floor.

    On a GPU caches are flushed before each call; the resident times are without flushing.
    """

    copy_ms: float = column("copy\nms", format=".2f")
    encode_ms: float = column("encode\nms", format=".2f", better="lower")
    encode_p95_ms: float = column("encode\np95 ms", format=".2f", better="lower")
    decode_ms: float = column("decode\nms", format=".2f", better="lower")
    decode_p95_ms: float = column("decode\np95 ms", format=".2f", better="lower")
    encode_gb_per_s: float = column("encode\nGB/s", format=".2f", better="higher")
    decode_gb_per_s: float = column("decode\nGB/s", format=".2f", better="higher")
    encode_copies: float = column("encode\ncopies", format=".1f", better="lower")
    decode_copies: float = column("decode\ncopies", format=".1f", better="lower")
    encode_resident_ms: float | None = column("encode\nresident", format=".3f", better="lower")
    decode_resident_ms: float | None = column("decode\nresident", format=".3f", better="lower")
    encode_launch_ms: float | None = column("encode\nlaunch", format=".3f", better="lower")
    first_encode_ms: float = column("first\nms", format=".0f")
    encode_floors: float = column("encode\nfloors", format=".1f", better="lower")
    decode_floors: float = column("decode\nfloors", format=".1f", better="lower")
    reference_encode_ms: float | None = column("reference\nms", format=".0f")
    encode_speedup: float | None = column("times\nfaster", format=".0f", better="higher")


@dataclass(frozen=True, kw_only=True)
class CodecColumns:
    """The measurements of one codec on one tensor."""

    shape: str = column("shape", key=True)
    content: str = column("content", key=True)
    codec: str = column("codec", key=True)
    tensor_bytes: int = column("tensor\nbytes", format="d")
    wire_bytes: int = column("wire\nbytes", format="d", better="lower")
    wire_ratio: float = column("wire", format=".3f", better="lower")
    bits_per_value: float = column("bits", format=".2f", better="lower")
    losses: Losses
    times: CodecTimes
    encode_extra_bytes: int | None = column("extra\nbytes", format="d", better="lower")
    encode_extra_ratio: float | None = column("extra\nmemory", format=".3f", better="lower")


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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
