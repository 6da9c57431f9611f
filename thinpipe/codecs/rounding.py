"""Keys of stochastic rounding: the random draws of ``+sr`` depend only on a 64-bit key and the position of a value.

The sender identifies a message by a few integers, and ``rounding_key`` hashes them to its key: no two messages use the
same draws, and a repeated or resumed run rounds as before. Keys 0, 1, 2 ... would not do: two keys with equal high 32
bits have the same draws at different positions.

From the key to the draw of value i, the same on every machine (uint32 arithmetic that wraps; lo and hi are the low and
high 32 bits):

    z = mix(lo(i) ^ lo(key))
    w = mix(z + hi(key) + hi(i) * 0x9E3779B9)
    u = (w >> 8) / 2^24

    mix(z): z ^= z >> 16;  z *= 0x7FEB352D;  z ^= z >> 15;  z *= 0x846CA68B;  z ^= z >> 16
"""

from __future__ import annotations

_UINT64 = (1 << 64) - 1


def rounding_key(*name: int) -> int:
    """Return the key for a name of integers from -2^63 to 2^64: a chain of splitmix64 steps.

    Keys of names of equal length collide as rarely as 64 random bits do.
    """
    key = 0
    for number in name:
        key = _mix((key + 0x9E3779B97F4A7C15 + (number & _UINT64)) & _UINT64)
    return key


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64
    return z ^ (z >> 31)
