"""Lloyd-Max quantizers of a normal distribution: the 2^bits levels of least squared error, and their distortion.

Lloyd's two conditions: a boundary lies half way between its levels, and a level is the mean of the values between its
boundaries. Newton's method solves both at once for the positive half; the other half is its mirror image. Lloyd's
iteration would take thousands of steps at 8 bits.
"""

import itertools
import math
import statistics
import struct
from functools import lru_cache

MAX_BITS = 8


@lru_cache
def levels(bits: int) -> tuple[float, ...]:
    """Return all levels of a standard normal, ascending, as float32: 2 bits are -1.51, -0.453, 0.453, 1.51."""
    if not 0 <= bits <= MAX_BITS:
        raise ValueError(f"levels of a normal distribution have 0 to {MAX_BITS} bits, not {bits}")
    if bits == 0:
        return (0.0,)
    half = [_float32(level) for level in _positive_levels(2 ** (bits - 1))]
    return (*(-level for level in reversed(half)), *half)


@lru_cache
def boundaries(bits: int) -> tuple[float, ...]:
    """Return the decision boundaries between the levels, ascending, as float32."""
    chosen = levels(bits)
    return tuple(_float32((low + high) / 2) for low, high in itertools.pairwise(chosen))


@lru_cache
def distortion(bits: int) -> float:
    """Return the mean squared error of these levels on a standard normal."""
    edges = [-math.inf, *boundaries(bits), math.inf]
    kept = 0.0
    for level, low, high in zip(levels(bits), edges[:-1], edges[1:], strict=True):
        # E[(x - l)^2] = E[x^2] - 2 l E[x] + l^2, cell by cell.
        kept += 2 * level * (_density(low) - _density(high)) - level * level * (_above(low) - _above(high))
    return 1.0 - kept


def signed_levels(bits: int) -> tuple[float, ...]:
    """Return all levels indexed by codes whose highest bit is the sign: 2 bits are 0.453, 1.51, -0.453, -1.51."""
    positive = levels(bits)[1 << (bits - 1) :]
    return (*positive, *(-level for level in positive))


def magnitude_boundaries(bits: int) -> tuple[float, ...]:
    """Return the decision boundaries between the positive levels."""
    return boundaries(bits)[1 << (bits - 1) :]


def _positive_levels(count: int) -> list[float]:
    # The density of many levels is the cube root of the probability density (Panter and Dite): start from quantiles of
    # a normal of variance 3.
    start = statistics.NormalDist(0.0, math.sqrt(3.0))
    chosen = [start.inv_cdf(0.5 + (i + 0.5) / (2 * count)) for i in range(count)]
    for _ in range(50):
        change = _newton_step(chosen)
        chosen = [level - each for level, each in zip(chosen, change, strict=True)]
        if max(map(abs, change)) < 1e-12:
            return chosen
    raise AssertionError(f"{count} levels did not converge")


def _newton_step(chosen: list[float]) -> list[float]:
    """Return the Newton step for level - mean of its cell = 0: solve the system with the tridiagonal Jacobian."""
    edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(chosen)), math.inf]
    last = len(chosen) - 1
    step: list[float] = []
    above: list[float] = []
    before = 0.0
    for i, level in enumerate(chosen):
        low, high = edges[i], edges[i + 1]
        share = _above(low) - _above(high)
        mean = (_density(low) - _density(high)) / share
        by_low = _density(low) * (mean - low) / share / 2 if i > 0 else 0.0
        by_high = _density(high) * (high - mean) / share / 2 if i < last else 0.0
        pivot = 1.0 - by_low - by_high + by_low * before
        step.append((level - mean + (by_low * step[-1] if i > 0 else 0.0)) / pivot)
        before = -by_high / pivot
        above.append(before)
    for i in reversed(range(last)):
        step[i] -= above[i] * step[i + 1]
    return step


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _above(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


def _float32(x: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded
