"""The numba-compiled loops: each runs one thread's share, in blocks small enough for the L1 cache.

Integer arithmetic that must stay narrow for SIMD is cast back at every step, because numba widens it to 64 bits.
"""
