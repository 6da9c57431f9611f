"""Keys of stochastic rounding: the numbers that ``+sr`` draws follow from a key of 64 bits and a value's place alone.

Whoever sends a message names it by a few numbers, and ``rounding_key`` makes its key of them: so no two messages
round alike, and a run that is repeated, or taken up again, rounds as it did before. Keys 0, 1, 2 ... would
not do: where the high word is the same, one key's draws are another's in other places.

From the key to the draw of value i, the same on every machine (all words have 32 bits and wrap):

    z = mix(low word of i ^ low word of key)
    w = mix(z + high word of key + high word of i * 0x9E3779B9)
    u = (w >> 8) / 2^24

    mix(z): z ^= z >> 16;  z *= 0x7FEB352D;  z ^= z >> 15;  z *= 0x846CA68B;  z ^= z >> 16
"""

from __future__ import annotations

_WORD = (1 << 64) - 1


def rounding_key(*name: int) -> int:
    """The key of what these numbers name, each from -2^63 to 2^64: a chain of splitmix64's steps.

    Names of one length have keys as different as 64 random bits are.
    """
    key = 0
    for number in name:
        key = _mix((key + 0x9E3779B97F4A7C15 + (number & _WORD)) & _WORD)
    return key


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)
