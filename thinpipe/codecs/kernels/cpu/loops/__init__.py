"""The compiled loops: numba, one thread's share each, blocks small enough for the first-level cache.

Integer arithmetic that should stay narrow enough for SIMD is cast back at every step, because numba widens it to 64
bits.
"""
