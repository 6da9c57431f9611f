"""What decoding did not bring back: squared error, bias, and what became of zeros."""

from __future__ import annotations

import math

from torch import Tensor

from thinpipe.measure.record import Column, Row

COLUMNS = (
    Column(name="relative_error", heading="error", format=".1e", better="lower"),
    Column(name="snr_db", heading="SNR\ndB", format=".1f", better="higher"),
    Column(name="bias", heading="bias", format="+.1f"),
    Column(name="zero_error", heading="zeros", format=".1e", better="lower"),
    Column(name="zero_fraction", heading="zero\nvalues", format=".3f"),
)


def measure_losses(x: Tensor, decoded: Tensor) -> Row:
    """The figures of COLUMNS for a tensor and what came of it."""
    error = relative_squared_error(x, decoded)
    zero = x == 0
    return {
        "relative_error": error,
        "snr_db": decibels(error),
        "bias": bias(x, decoded),
        "zero_error": zero_error(x, decoded, zero),
        "zero_fraction": zero.double().mean().item(),
    }


def relative_squared_error(x: Tensor, decoded: Tensor) -> float | None:
    """Squared error over squared size: 0.01 is a hundredth of the energy; None where there is none to divide by."""
    difference, size = decoded.double() - x.double(), x.double()
    energy = size.square().sum().item()
    return _finite(difference.square().sum().item() / energy if energy else math.nan)


def decibels(error: float | None) -> float | None:
    return -10 * math.log10(error) if error else None


def bias(x: Tensor, decoded: Tensor) -> float | None:
    """The mean error in standard errors of that mean: about -2 to 2 where errors are as often up as down.

    None for a single value, whose spread is unknown, and where all errors are the same and not zero.
    """
    difference = (decoded.double() - x.double()).reshape(-1)
    mean = difference.mean().item()
    if mean == 0:
        return 0.0
    deviation = difference.std().item() if difference.numel() > 1 else math.nan
    return _finite(mean / deviation * math.sqrt(difference.numel()) if deviation else math.nan)


def zero_error(x: Tensor, decoded: Tensor, zero: Tensor) -> float | None:
    """The root mean square of what zeros decode to, over that of the tensor; None where there are no zeros."""
    size = x.double().square().mean().sqrt().item()
    if not zero.any() or not size:
        return None
    return _finite(decoded[zero].double().square().mean().sqrt().item() / size)


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None
